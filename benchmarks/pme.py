"""PME at equal force error: nvdd's against nvalchemi-toolkit-ops' and torch-pme's, and two ranks against one.

``python -m benchmarks.pme [--charges 32000] [--accuracy 1e-5] [--rounds 3] [--json PATH]``; on GPUs
``--device cuda``, and ``--parts ranks`` for the ranks alone. Energy, forces, stress, float64, one thread, neighbour
list given; charges are +1 and -1, off the places of a simple cubic lattice with 0.1 per cubic Angstrom. nvdd chooses
its parameters by the asked accuracy. The others get the same cutoff, splitting and their highest order; their mesh is
refined until its force error, against a sum converged to 1e-9, is nvdd's or smaller. Measurements that are compared
alternate and the best of each counts: other programs can only slow one down.

Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ase
import numpy as np
import torch

from benchmarks.mace_cases import Clock, peak_gb
from nvdd_core.comm import Mesh
from nvdd_core.dynamics import DomainParallel, VelocityVerlet
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch, WorkerPool
from nvdd_pme.model import COULOMB, Coulomb, load_pme

FAST = frozenset({"energy", "forces", "stress"})
Answer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def loaded(device: str, **options: Any) -> Coulomb:
    """Load the model in float64."""
    return load_pme(dtype=torch.float64, device=torch.device(device), **options)


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def ions(n: int) -> ase.Atoms:
    """About n ions; the next smaller even cube."""
    m = 2 * round(n ** (1 / 3) / 2)
    grid = np.stack(np.meshgrid(*[np.arange(m)] * 3, indexing="ij"), -1).reshape(-1, 3)
    side = m * 10.0 ** (1 / 3)
    shaken = grid + 0.3 * np.random.default_rng(0).uniform(-1, 1, grid.shape)
    atoms = ase.Atoms(
        numbers=np.ones(m**3, dtype=int), positions=shaken * side / m, cell=[side] * 3, pbc=True
    )
    atoms.set_array("charges", np.where(grid.sum(1) % 2, 1.0, -1.0))
    return atoms


class Nvdd:
    """A steady step of `DistributedModel` on one rank."""

    def __init__(self, atoms: ase.Atoms, model: Coulomb) -> None:
        self.model = model
        self.sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single(model.device))
        self.run = DistributedModel(model, DomainConfig())
        self._steady = ExitStack()  # kept: with its last reference the steady evaluations would end
        self._steady.enter_context(self.run.steady("auto"))
        for _ in range(4):
            self()

    def __call__(self) -> Answer:
        out = self.run(self.sharded, FAST)
        if out.forces is None or out.stress is None:
            raise RuntimeError("no forces")
        return out.energy, out.forces, out.stress[0]

    def forces(self) -> torch.Tensor:
        """In the order of the atoms."""
        return self()[1][torch.argsort(self.sharded.ids)]


class Peer(ABC):
    """Another library's energy, differentiated for positions and strain."""

    def __init__(self, atoms: ase.Atoms, cutoff: float, device: str) -> None:
        import vesin

        self.positions = torch.tensor(atoms.positions, device=device)
        self.cell = torch.tensor(atoms.cell.array, device=device)
        self.charges = torch.tensor(atoms.arrays["charges"], device=device)
        found = vesin.NeighborList(cutoff=cutoff, full_list=True, sorted=True).compute(
            atoms.positions, atoms.cell.array, True, "ijS"
        )
        self.i, self.j, self.shifts = (torch.tensor(part.astype(np.int64), device=device) for part in found)

    @abstractmethod
    def energy(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        """Return the energy (), e^2/Angstrom."""

    def __call__(self) -> Answer:
        x0 = self.positions.requires_grad_()
        strain = torch.zeros_like(self.cell).requires_grad_()
        symmetric = 0.5 * (strain + strain.T)
        energy = COULOMB * self.energy(x0 + x0 @ symmetric, self.cell + self.cell @ symmetric)
        gradient, virial = torch.autograd.grad(energy, [x0, strain])
        return energy.detach(), -gradient, virial / torch.linalg.det(self.cell)

    def forces(self) -> torch.Tensor:
        """In the order of the atoms."""
        return self()[1]


class Nvalchemi(Peer):
    """``particle_mesh_ewald``, splines of order 6."""

    def __init__(self, atoms: ase.Atoms, cutoff: float, device: str, alpha: float, mesh: int) -> None:
        from nvalchemiops.torch.interactions.electrostatics import particle_mesh_ewald

        super().__init__(atoms, cutoff, device)
        self.method, self.alpha, self.mesh = particle_mesh_ewald, alpha, (mesh, mesh, mesh)
        counts = torch.bincount(self.i, minlength=len(atoms)).cumsum(0)
        self.list = torch.stack([self.i, self.j]).int()
        self.ptr = torch.cat([counts.new_zeros(1), counts]).int()
        self.int_shifts = self.shifts.int()

    def energy(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        found = self.method(
            x, self.charges, cell[None], alpha=self.alpha, mesh_dimensions=self.mesh, spline_order=6,
            neighbor_list=self.list, neighbor_ptr=self.ptr, neighbor_shifts=self.int_shifts,
        )  # fmt: skip
        total: torch.Tensor = found.sum()
        return total


class TorchPme(Peer):
    """``PMECalculator`` with 7 nodes; a half list, the cheaper one."""

    def __init__(self, atoms: ase.Atoms, cutoff: float, device: str, alpha: float, spacing: float) -> None:
        import torchpme

        super().__init__(atoms, cutoff, device)
        first = (self.shifts * self.shifts.new_tensor([9999, 99, 1])).sum(1) > 0
        one = (self.i < self.j) | ((self.i == self.j) & first)
        self.i, self.j, self.shifts = self.i[one], self.j[one], self.shifts[one]
        self.pairs, self.moves = torch.stack([self.i, self.j], 1), self.shifts.double()
        potential = torchpme.CoulombPotential(smearing=1.0 / (np.sqrt(2.0) * alpha))
        self.method = torchpme.PMECalculator(potential, spacing, interpolation_nodes=7).double()

    def energy(self, x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        r = (x[self.j] - x[self.i] + self.moves @ cell).norm(dim=1)
        q = self.charges[:, None]
        total: torch.Tensor = (q * self.method(q, cell, x, self.pairs, r)).sum()
        return total


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean square, relative to that of the exact forces."""
    return float((found - exact).square().sum().sqrt() / exact.square().sum().sqrt())


def as_precise(make: Callable[[float], Peer], sizes: list[float], exact: torch.Tensor, limit: float) -> Any:
    """Return the first of the sizes, coarse to fine, whose error is within the limit: size, error, run."""
    for size in sizes:
        run = make(size)
        found = error(run.forces(), exact)
        if found <= limit or size == sizes[-1]:
            return size, found, run
    raise RuntimeError("no sizes")


def alternate(runs: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Return the least seconds of each: CPU time of this process, wall time on a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            synchronize(device)
            start = clock()
            run()
            synchronize(device)
            best[name] = min(best[name], clock() - start)
    return best


def against_others(n: int, accuracy: float, rounds: int, device: str) -> dict[str, Any]:
    """One rank against the libraries that are installed."""
    atoms = ions(n)
    exact = Nvdd(atoms, loaded(device, accuracy=1e-9)).forces()
    ours = Nvdd(atoms, loaded(device, accuracy=accuracy))
    chosen, limit = ours.model.chosen[0], error(ours.forces(), exact)
    side, cutoff = float(atoms.cell[0, 0]), ours.model.cutoff
    report: dict[str, Any] = {
        "charges": len(atoms),
        "nvdd": {"settings": ours.model.describe(), "error": limit},
    }
    meshes = [float(m) for m in (64, 72, 80, 96, 108, 120, 128, 144, 160, 180, 200, 216)]
    meshes = [
        mesh for mesh in meshes if mesh >= chosen.size[0]
    ]  # of a lower order, so none coarser than ours will do
    runs: dict[str, Callable[[], Any]] = {"nvdd": ours}
    if find_spec("nvalchemiops"):
        mesh, found, runs["nvalchemiops"] = as_precise(
            lambda m: Nvalchemi(atoms, cutoff, device, chosen.alpha, int(m)), meshes, exact, limit
        )
        report["nvalchemiops"] = {"settings": f"order 6, mesh {mesh:g}", "error": found}
    if find_spec("torchpme"):
        powers = [2.1 * side / 2**p for p in (6, 7, 8)]  # it rounds to powers of two
        spacing, found, runs["torch-pme"] = as_precise(
            lambda s: TorchPme(atoms, cutoff, device, chosen.alpha, s), powers, exact, limit
        )
        report["torch-pme"] = {"settings": f"7 nodes, spacing {spacing:.3g} A", "error": found}
    times = alternate(runs, rounds, device)
    for name, seconds in times.items():
        report[name] |= {"ms": 1e3 * seconds, "times nvdd": seconds / times["nvdd"]}
    return report


def placed(mesh: Mesh, n: int, options: dict[str, Any], skin: float) -> tuple[ShardedBatch, DistributedModel]:
    """Return ions spread over ranks, and the model of each (collective)."""
    torch.set_num_threads(1)
    sharded = ShardedBatch.scatter(Batch.from_ase(ions(n)) if mesh.rank == 0 else None, mesh)
    model = loaded(str(mesh.device), **options)
    return sharded, DistributedModel(model, DomainConfig(skin=skin), mesh)


def steps_on_ranks(mesh: Mesh, n: int, options: dict[str, Any], steps: int) -> dict[str, float]:
    """Return the least wall seconds of a steady step, and a GPU's peak memory in GB (collective)."""
    device = mesh.device.type
    sharded, run = placed(mesh, n, options, 0.0)
    best = float("inf")
    with run.steady("auto"):
        for step in range(4 + steps):
            synchronize(device)
            mesh.barrier()
            start = time.perf_counter()
            run(sharded, {"energy", "forces"})
            synchronize(device)
            if step >= 4:  # the first find out what is cheaper
                best = min(best, time.perf_counter() - start)
    return {"s": best, "gb": peak_gb(device)}


def dynamics_on_ranks(mesh: Mesh, n: int, options: dict[str, Any], steps: int) -> dict[str, float]:
    """Return the mean wall seconds of a step of dynamics, whose host runs ahead of a GPU, and GB (collective).

    Atoms start at rest and hardly move in such short steps, so that nothing is rebuilt.
    """
    sharded, run = placed(mesh, n, options, 0.5)
    sharded.rows["velocities"] = torch.zeros_like(sharded.positions)
    clock = Clock(run, steps)
    DomainParallel(VelocityVerlet(1e-4), run, [clock]).run(sharded, 2 * clock.steps)
    first, second = clock.seen
    if second["rebuilds"] > first["rebuilds"]:
        raise RuntimeError("atoms moved too far for steps without a rebuild")
    return {"s": (second["time"] - first["time"]) / clock.steps, "gb": peak_gb(mesh.device.type)}


def two_ranks(
    n: int, accuracy: float, rounds: int, engine: str, device: str, steps: int = 0
) -> dict[str, Any]:
    """Two ranks against one, wall time; pools take turns, so that both meet the same noise."""
    measure, number = (dynamics_on_ranks, steps) if steps else (steps_on_ranks, 10)
    options = {"accuracy": accuracy, "engine": engine}
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    pools = {ranks: WorkerPool(ranks, device, timeout_s=600.0) for ranks in found}
    try:
        for _ in range(rounds):
            for ranks, pool in pools.items():
                found[ranks] += [max(pool.run(measure, n, options, number), key=lambda one: one["s"])]
    finally:
        for pool in pools.values():
            pool.close()
    one, two = (min(1e3 * step["s"] for step in found[ranks]) for ranks in found)
    gb = {f"{ranks}, GB": max(step["gb"] for step in steps) for ranks, steps in found.items()}
    return {"charges": n, "one ms": one, "two ms": two, "ratio": one / two, "target": ">= 1.6"} | gb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--charges", type=int, default=32_000)
    parser.add_argument("--accuracy", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", default="auto", help="of the two ranks")
    parser.add_argument("--device", default="cpu", help="cpu, cuda")
    parser.add_argument("--parts", nargs="+", default=["others", "ranks"], choices=["others", "ranks"])
    parser.add_argument("--steps", type=int, default=0, help="measure ranks in dynamics of so many steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    if "others" in given.parts:
        report |= against_others(given.charges, given.accuracy, given.rounds, given.device)
        for name, found in report.items():
            print(f"{name}: {found}", flush=True)
    if "ranks" in given.parts:
        report["two ranks"] = two_ranks(
            given.charges, given.accuracy, given.rounds, given.engine, given.device, given.steps
        )
        print(f"two ranks: {report['two ranks']}")
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
