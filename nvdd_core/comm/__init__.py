"""Ranks, collectives, and the exchange of ghost rows. Layer: comm."""

from nvdd_core.comm.counter import CommCounter, CommTally
from nvdd_core.comm.faults import Fault, agreed, group_scope, publish
from nvdd_core.comm.halo import HaloPlan, all_reduce_sum_replicated, all_reduce_sum_symmetric
from nvdd_core.comm.mesh import TIMEOUT_S, Mesh, Pending, mesh_by_id
from nvdd_core.comm.rows import all_to_all_rows, received_splits

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
    "all_to_all_rows",
    "group_scope",
    "mesh_by_id",
    "publish",
    "received_splits",
]
