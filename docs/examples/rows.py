"""Six rows in a chain on two ranks: what an exchange moves, and what the scatter modes make of a sum.

``python docs/examples/rows.py``; it starts the two ranks itself.
"""

from __future__ import annotations

import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.runtime import WorkerPool
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode
from nvdd_core.tensor import ParticleHaloConfig, ParticleHaloMetadata, ShardTensor

LINKS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]  # by global id
OWNED = [[0, 1, 2], [3, 4, 5]]
GHOST = [[3], [2]]


def plan_of(mesh: Mesh) -> HaloPlan:
    """Return this rank's part of the plan: rank 0 sends its row 2, rank 1 its row 0."""
    send = torch.tensor([[2], [0]][mesh.rank])
    splits = [(0, 1), (1, 0)][mesh.rank]  # one row to, and one from, the other rank
    return HaloPlan(mesh, n_owned=3, send_index=send, send_splits=splits, recv_splits=splits)


def edges(rank: int, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return senders and receivers as local rows."""
    place = {i: row for row, i in enumerate(OWNED[rank] + GHOST[rank])}
    if form == "full":  # both directions, each on the rank that owns the receiver
        both = LINKS + [(b, a) for a, b in LINKS]
        mine = [(s, r) for s, r in both if r in OWNED[rank]]
    else:  # each link once, by the rank that owns its first end; it writes both ends
        once = [link for link in LINKS if link[0] in OWNED[rank]]
        mine = once + [(b, a) for a, b in once]
    senders, receivers = zip(*mine, strict=True)
    return torch.tensor([place[i] for i in senders]), torch.tensor([place[i] for i in receivers])


def text(rows: torch.Tensor, n_owned: int = 3) -> str:
    """Write rows as ``owned | ghost``."""
    words = [f"{float(value):g}" for value in rows]
    return " | ".join(" ".join(part) for part in (words[:n_owned], words[n_owned:]) if part)


def work(mesh: Mesh) -> list[str]:
    """Return what each line of the output says of this rank."""
    plan = plan_of(mesh)
    owned = torch.tensor(OWNED[mesh.rank], dtype=torch.float64) + 1  # row i holds i + 1
    local = plan.forward(owned)
    said = [text(local), text(plan.reverse(torch.ones(4)))]

    meta, config = ParticleHaloMetadata(plan), ParticleHaloConfig(mesh, ghost_width=1.0)
    for form in ("full", "half"):
        sender, receiver = edges(mesh.rank, form)
        for mode in ScatterMode:
            spec = DistributionSpec(storage=HaloStorage(scatter=mode))
            x = ShardTensor.wrap(local, spec=spec, meta=meta, config=config)
            before = mesh.counter.snapshot()
            sums = torch.zeros_like(x).index_add_(0, receiver, local[sender])
            sent = sorted(mesh.counter.since(before).calls, reverse=True)
            said.append(f"{text(sums.to_local()):12s}{', '.join(sent)}")
    return said


def main() -> None:
    """Print one line for each thing done, with both ranks side by side."""
    with WorkerPool(2) as pool:
        first, second = pool.run(work)
    modes = [f"{form} list, {mode}" for form in ("full", "half") for mode in ScatterMode]
    print(f"{'':28s}{'rank 0':14s}{'rank 1':12s}collectives")
    for title, a, b in zip(["exchange", "reverse of ones", *modes], first, second, strict=True):
        print(f"{title:28s}{a[:12]:14s}{b}".rstrip())


if __name__ == "__main__":
    main()
