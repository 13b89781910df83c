"""Measures one MACE model: bare, and under nvdd on one or several ranks, at several sizes in one process a rank.

``python -m benchmarks.mace_cases bare|nvdd --model FILE --cells 8x8x16 8x16x16`` prints one JSON object a size: ms of
an evaluation (bare) or of an NVE step (nvdd), peak memory, what the time was spent on. `benchmarks.mace` runs it.

Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Cells = tuple[int, int, int]
LATTICE = 5.64  # A, rock salt
SHAKEN = 0.14  # A, root mean square of a component
TEMPERATURE = 300.0  # K
SHAPES: dict[str, dict[str, Any]] = {
    # MACE-MP-0 medium, and one that a CPU evaluates in seconds
    "medium": {"hidden": "128x0e+128x1o", "r_max": 6.0, "elements": 89, "max_ell": 3, "correlation": 3},
    "small": {"hidden": "32x0e+32x1o", "r_max": 5.0, "elements": 20, "max_ell": 2, "correlation": 2},
}


def make_model(path: str, shape: str) -> None:
    """Save a model with random weights, float32."""
    from nvdd_mace.conformance import random_module

    chosen = dict(SHAPES[shape])
    n = chosen.pop("elements")
    module = random_module(
        **chosen,
        dtype=torch.float32,
        num_bessel=10,
        num_elements=n,
        atomic_numbers=list(range(1, n + 1)),
        atomic_energies=np.zeros(n),
        avg_num_neighbors=40.0,
        use_reduced_cg=False,  # a file that is the same with and without cuEquivariance
        radial_MLP=[64, 64, 64],
        atomic_inter_scale=0.2,
    )
    torch.save(module, path)


def sites(cells: Cells) -> Any:
    """Return NaCl, 8 atoms a cell."""
    from ase.build import bulk

    return bulk("NaCl", "rocksalt", a=LATTICE, cubic=True).repeat(cells)


def rock_salt(cells: Cells) -> Any:
    """Return NaCl, shaken."""
    atoms = sites(cells)
    atoms.positions += np.random.default_rng(0).normal(0.0, SHAKEN, (len(atoms), 3))
    return atoms


def einstein_crystal(sharded: Any, cells: Cells) -> Any:
    """Return velocity Verlet steps of 1 fs in which a spring holds each atom to its site.

    Random weights give forces of some 0.01 eV/A, which hold no crystal: it would fall apart during a measurement, and
    the model would work on up to a fifth more edges than where the bare model was measured. The springs are those that
    make `SHAKEN` the spread at `TEMPERATURE`, so the number of edges stays.
    """
    from nvdd_core.dynamics import VelocityVerlet
    from nvdd_core.dynamics.units import K_B

    spring = K_B * TEMPERATURE / SHAKEN**2  # eV/A^2
    # a column of the batch's rows, so that it goes with them
    sharded.rows["site"] = torch.as_tensor(sites(cells).positions).to(sharded.ids.device)[sharded.ids]

    class Tethered(VelocityVerlet):
        def init(self, state: Any) -> None:
            self._pull(state)
            super().init(state)

        def second_half(self, state: Any) -> None:
            self._pull(state)
            super().second_half(state)

        def _pull(self, state: Any) -> None:
            state.forces = torch.add(state.forces, state.positions - sharded.rows["site"], alpha=-spring)

    return Tethered(1.0)


def bare(args: argparse.Namespace, cells: Cells) -> dict[str, Any]:
    """Measure mace's own forward, as its calculator calls it, with the graph given."""
    from nvdd_mace.foreign import imported

    neighborhood = imported("mace.data.neighborhood").get_neighborhood
    module = _bare_module(args)
    atoms = rock_salt(cells)
    edges, shifts, unit_shifts, cell = neighborhood(
        atoms.positions, float(module.r_max), (True,) * 3, np.array(atoms.cell)
    )
    real = {"dtype": torch.float32, "device": args.device}
    n, numbers = len(atoms), torch.as_tensor(atoms.numbers)
    attributes = torch.nn.functional.one_hot(numbers - 1, len(module.atomic_numbers))
    data = {
        "positions": torch.as_tensor(atoms.positions).to(**real),
        "node_attrs": attributes.to(**real),
        "edge_index": torch.as_tensor(edges).long().to(args.device),
        "shifts": torch.as_tensor(shifts).to(**real),
        "unit_shifts": torch.as_tensor(unit_shifts).to(**real),
        "cell": torch.as_tensor(cell).to(**real),
        "batch": torch.zeros(n, dtype=torch.int64, device=args.device),
        "ptr": torch.tensor([0, n], device=args.device),
        "head": torch.zeros(1, dtype=torch.int64, device=args.device),
    }
    times: list[float] = []
    forces = None
    for _ in range(2 + args.repeats):
        _synchronize(args.device)
        begin = time.perf_counter()
        forces = module(dict(data), training=False, compute_force=True)["forces"].detach()
        _synchronize(args.device)
        times.append(1e3 * (time.perf_counter() - begin))
    if args.profile:
        _profile(args, lambda: module(dict(data), training=False, compute_force=True), 0)
    if args.reference and forces is not None:
        np.save(args.reference, forces.cpu().numpy())
    return {"ms": statistics.median(times[2:]), "all_ms": times, "edges": int(edges.shape[1])}


def _bare_module(args: argparse.Namespace) -> Any:
    from nvdd_mace.foreign import built_in, imported, modules

    del modules  # imported, so that the file's classes are there
    module = torch.load(args.model, weights_only=False, map_location=args.device)
    if args.backend == "cueq":
        with built_in(torch.float32):
            module = imported("mace.cli.convert_e3nn_cueq").run(module, return_model=True, device=args.device)
    return module.to(args.device).eval().requires_grad_(False)


def nvdd(args: argparse.Namespace, cells: Cells, mesh: Any, model: Any) -> dict[str, Any]:
    """Measure steps of NVE dynamics: neighbour list, migration, integration included."""
    from nvdd_core.dynamics import DomainParallel, initial_velocities
    from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch

    atoms = rock_salt(cells) if mesh.rank == 0 else None
    sharded = ShardedBatch.scatter(None if atoms is None else Batch.from_ase(atoms), mesh)
    sharded.rows["velocities"] = initial_velocities(
        sharded.masses, sharded.ids, TEMPERATURE, 1, mesh.all_reduce_sum_
    )
    distributed = DistributedModel(model, DomainConfig(skin=args.skin), mesh)
    error = None
    if args.reference and Path(args.reference).exists():
        error = _difference(distributed, sharded, mesh, np.load(args.reference))
    distributed.timer._every = 1  # time every step, not one of sixteen
    clock = Clock(distributed, args.steps)
    runner = DomainParallel(einstein_crystal(sharded, cells), distributed, [clock], capture=args.capture)
    # the first half warms up, as bare evaluations do: kernels are chosen, graphs made
    runner.run(sharded, 2 * clock.steps)
    start, end = clock.seen
    wall = 1e3 * (end["time"] - start["time"]) / clock.steps
    phases = {name: 1e3 * s / clock.steps for name, s in end["seconds"].items()}
    spent = end["tally"]
    cpu = 1e3 * (end["cpu"] - start["cpu"]) / clock.steps
    plan = distributed.domain.plan
    mine = {
        "owned": plan.n_owned,
        "ghost": plan.n_ghost,
        "phases_ms": phases,
        "cpu_ms": cpu,
        "peak_gb": peak_gb(args.device),
    }
    if args.profile:
        _profile(args, lambda: distributed(sharded, {"forces"}), mesh.rank)
    return {
        "ms": wall,
        "rebuilds_per_step": (end["rebuilds"] - start["rebuilds"]) / clock.steps,
        "calls_per_step": {k: v / clock.steps for k, v in spent.calls.items()},
        "mb_per_step": sum(spent.bytes.values()) / clock.steps / 1e6,
        "max_dF_vs_bare": error,
        "per_rank": mesh.all_gather_objects(mine),
    }


class Clock:
    """Reads the clock halfway through a run of twice `steps` steps, and after its last one.

    Steps with a hook ask for more outputs, whose evaluation is captured when they are asked for the third time: at the
    start, after a quarter of the run, at the half. So there is a hook for each quarter, and none of the captures falls
    within the half that is measured.
    """

    def __init__(self, distributed: Any, steps: int) -> None:
        from nvdd_core.dynamics import HookScope

        self.every, self.scope = max(1, steps // 2), HookScope.LOCAL
        self.steps = 2 * self.every
        self.seen: list[dict[str, Any]] = []
        self._distributed, self._mesh = distributed, distributed.mesh

    def __call__(self, ctx: Any) -> None:
        """Read the clock, all ranks together."""
        if ctx.step == 0 or ctx.step % self.steps:
            return
        _synchronize(self._mesh.device.type)
        self._mesh.barrier()
        found = {
            "time": time.perf_counter(),
            "cpu": time.process_time(),
            "rebuilds": self._distributed.n_rebuilds,
        }
        if not self.seen:
            self._distributed.timer.reset()
            self._before = self._mesh.counter.snapshot()
        else:
            found |= {
                "seconds": self._distributed.timer.seconds(),
                "tally": self._mesh.counter.since(self._before),
            }
        self.seen.append(found)


def _difference(distributed: Any, sharded: Any, mesh: Any, reference: Any) -> float:
    """Return the largest difference of a force component from `reference`, in the order of atoms."""
    forces = torch.zeros(sharded.n_global, 3, dtype=torch.float64, device=mesh.device)
    found = distributed(sharded, {"forces"}).forces
    forces[sharded.ids] = found
    return float(np.abs(mesh.all_reduce_sum_(forces).cpu().numpy() - reference).max())


def _profile(args: argparse.Namespace, evaluate: Callable[[], Any], rank: int) -> None:
    """Print what three evaluations spend."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if args.device != "cpu" else [])
    for _ in range(2):
        evaluate()
    with profile(activities=activities) as found:
        for _ in range(3):
            evaluate()
        _synchronize(args.device)
    if rank == 0:
        by = "self_cpu_time_total" if args.device == "cpu" else "self_cuda_time_total"
        print(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=70), file=sys.stderr)
        print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15), file=sys.stderr)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def peak_gb(device: str) -> float:
    """Return the most memory of a GPU that was in use."""
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 1e9


def on_rank(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Measure every size on one rank; rank 0 prints."""
    from nvdd_core.comm import Mesh
    from nvdd_mace.model import load

    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    alone = args.kind == "bare" or args.ranks == 1
    mesh = (
        Mesh.single(device) if alone else Mesh.initialise(rank, args.ranks, device, f"file://{folder}/meet")
    )
    model = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if args.kind == "nvdd":
            model = load(
                dtype=torch.float32,
                device=device,
                checkpoint=args.model,
                trust=True,
                backend=args.backend,
                blockwise=args.blockwise,
            )
    parity = [str(w.message) for w in told if "differ by at most" in str(w.message)]
    for text in args.cells:
        cells: Cells = tuple(int(n) for n in text.split("x"))  # type: ignore[assignment]
        result: dict[str, Any] = {"kind": args.kind, "backend": args.backend, "ranks": args.ranks}
        result["atoms"] = 8 * int(np.prod(cells))
        if parity:
            result["parity"] = parity[0]
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            result |= bare(args, cells) if args.kind == "bare" else nvdd(args, cells, mesh, model)
        except torch.cuda.OutOfMemoryError:
            result["error"] = "out of memory"
        result["peak_gb"] = peak_gb(args.device)
        if rank == 0:
            print(json.dumps(result), flush=True)
        if "error" in result:
            break
    mesh.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["make", "bare", "nvdd"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--cells", nargs="+", default=["4x4x4"])
    parser.add_argument("--backend", default="e3nn")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--skin", type=float, default=0.5)
    parser.add_argument("--blockwise", default="auto", help="auto, true, false or how many edges at a time")
    parser.add_argument("--capture", default="auto", help="in CUDA graphs: auto, on, off")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--reference", default="", help="file of bare forces: bare writes it, nvdd compares")
    args = parser.parse_args()
    if args.kind == "make":
        make_model(args.model, args.shape)
        return
    if args.device == "cpu":
        os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory() as folder:
        if args.ranks == 1:
            on_rank(0, args, folder)
        else:
            from torch.multiprocessing.spawn import spawn

            spawn(on_rank, (args, folder), args.ranks)


if __name__ == "__main__":
    main()
