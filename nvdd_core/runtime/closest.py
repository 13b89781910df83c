"""The closest two rows of all ranks, for messages: rows on top of each other are the usual cause of what is not finite.

Key object: `closeness`. Invariant: it is asked once at a start or after a failure, never in a step. Layer: runtime.
"""

from __future__ import annotations

import math

import torch

from nvdd_core.runtime.domain import Domain
from nvdd_core.runtime.sharded import ShardedBatch

TOO_CLOSE_A = 0.1  # a seventh of the shortest bond
_BLOCK_EDGES = 4_194_304


def closeness(domain: Domain, sharded: ShardedBatch) -> str:
    """Return in words which atoms are closer than any bond, or "" (collective)."""
    found = min(sharded.mesh.all_gather_objects(_closest(domain, sharded)))
    distance, first, second = found
    if not distance < TOO_CLOSE_A:
        return ""
    pair = f"atom {first} and its own image" if first == second else f"atoms {first} and {second}"
    return f"{pair} are {distance:.3g} A apart"


@torch.no_grad()
def _closest(domain: Domain, sharded: ShardedBatch) -> tuple[float, int, int]:
    """Return distance and ids of the closest two rows of this rank's list (collective)."""
    edges, plan = domain.neighbors, domain.plan
    points = edges.extend(plan.forward(sharded.positions - domain.offset), domain.box.cell, domain.system)
    least = (math.inf, 0, 0)
    for start in range(0, edges.senders.shape[0], _BLOCK_EDGES):
        senders = edges.senders[start : start + _BLOCK_EDGES].long()
        receivers = edges.receivers[start : start + _BLOCK_EDGES].long()
        squared = (points[senders] - points[receivers]).square().sum(1).nan_to_num(math.inf)
        k = int(squared.argmin())
        ends = domain.ids[torch.stack([edges.extended_rows[senders[k]], receivers[k]])]
        least = min(least, (math.sqrt(float(squared[k])), int(ends.min()), int(ends.max())))
    return least
