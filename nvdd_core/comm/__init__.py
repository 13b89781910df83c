"""Ranks, collectives, and the exchange of ghost rows. Layer: comm."""

from nvdd_core.comm.counter import CommCounter, CommTally
from nvdd_core.comm.faults import Fault, agreed, group_scope, publish
from nvdd_core.comm.halo import HaloPlan, all_reduce_sum_replicated, all_reduce_sum_symmetric
from nvdd_core.comm.mesh import TIMEOUT_S, Mesh, Pending

__all__ = [
    "TIMEOUT_S",
    "CommCounter",
    "CommTally",
    "Fault",
    "HaloPlan",
    "Mesh",
    "Pending",
    "agreed",
    "all_reduce_sum_replicated",
    "all_reduce_sum_symmetric",
    "group_scope",
    "publish",
]
