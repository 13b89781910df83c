"""One measurement of the closest peer, nvalchemi-toolkit's distributed MACE, on sodium chloride.

``python -m benchmarks.mace_peer --model FILE --cells 8 8 16 --ranks 2 --repeats 5`` prints one JSON object on stdout;
everything else (stages, warnings of libraries) goes to stderr. Each rank is a process with a GPU of its own.

Key objects: `evaluations` times halo + neighbour list + model, the way their own tests drive `DistributedModel`;
`dynamics` times whole NVE steps of their `DomainParallel`; `report` puts the ranks' results together.

Invariant: the structure depends on ``--cells`` alone, so that another program can measure the same one. A rank writes
what it has after each stage: a failure late in a run costs the numbers after it, not those before.
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
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

SODIUM, CHLORINE = 11, 17
JITTER = 0.002  # A a step and direction: a hot solid at 1 fs; far below half the skin over a whole run
FEMTOSECONDS = 1.0
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")


def structure(cells: list[int]) -> tuple[Any, Any, Any]:
    """Return positions, atomic numbers and cell of displaced rock salt, 8 atoms a conventional cell."""
    from benchmarks.mace_cases import rock_salt

    nx, ny, nz = cells
    atoms = rock_salt((nx, ny, nz))
    return atoms.positions, atoms.numbers, atoms.cell.array


def is_memory(error: Exception) -> bool:
    """Tell whether a GPU's memory was too small."""
    return any(sign in str(error) for sign in OUT_OF_MEMORY)


@dataclass
class Rank:
    """What one rank knows and has measured so far.

    Attributes
    ----------
    index, args, folder
        Rank, the command's arguments, where the ranks leave their results.
    result
        Goes to ``rank_<index>.json`` at every stage.
    marks
        When the parts of the present step began and the last one ended, see `timed`.
    """

    index: int
    args: argparse.Namespace
    folder: Path
    result: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)
    marks: list[float] = field(default_factory=list)

    @property
    def device(self) -> Any:
        """This rank's torch device."""
        import torch

        return torch.device("cuda", self.index) if self.args.device == "cuda" else torch.device("cpu")

    def stage(self, name: str) -> None:
        """Say what comes next, on stderr and in the result."""
        passed = time.perf_counter() - self.begin
        print(f"[peer {self.index} {passed:7.2f} s] {name}", file=sys.stderr, flush=True)
        self.result["stage"] = name
        self.save()

    def save(self) -> None:
        """Write the result, whole or not at all."""
        path = self.folder / f"rank_{self.index}.json"
        path.with_suffix(".part").write_text(json.dumps(self.result))
        path.with_suffix(".part").replace(path)

    def mark(self) -> None:
        """Note the time when the GPU has done all it was given."""
        import torch

        if self.args.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())

    def peak_gb(self) -> float:
        """Return the most memory that tensors have taken on this GPU, GB."""
        import torch

        return torch.cuda.max_memory_allocated() / 1e9 if self.args.device == "cuda" else 0.0

    def timed(self, step: Callable[[], Any], name: str, warm_up: int) -> list[list[float]]:
        """Return the milliseconds of the parts of each step, which all ranks begin together; parts end in `mark`."""
        import torch.distributed as dist

        times = []
        for i in range(-warm_up, self.args.repeats):
            self.stage(f"{name}: step {i}" + (" (warm up)" if i < 0 else ""))
            if dist.is_initialized():
                dist.barrier()
            self.mark()
            del self.marks[:-1]
            step()
            self.mark()
            times.append([1e3 * (b - a) for a, b in pairwise(self.marks)])
        return times[warm_up:]


@contextmanager
def group(rank: Rank) -> Iterator[Any]:
    """Join the ranks; yields the device mesh, or None on one rank."""
    import torch
    import torch.distributed as dist

    if rank.args.device == "cuda":
        torch.cuda.set_device(rank.index)
    if rank.args.ranks == 1:
        yield None
        return
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "nccl" if rank.args.device == "cuda" else "gloo",
        init_method=f"file://{rank.folder}/rendezvous",
        rank=rank.index,
        world_size=rank.args.ranks,
    )
    try:
        yield init_device_mesh(rank.args.device, (rank.args.ranks,), mesh_dim_names=("domain",))
    finally:
        dist.destroy_process_group()


def load(rank: Rank) -> Any:
    """Return the model file in their wrapper: float32, e3nn's kernels."""
    import torch
    from nvalchemi.models.mace import MACEWrapper

    model = torch.load(rank.args.model, map_location=rank.device, weights_only=False)
    return MACEWrapper(model.to(device=rank.device, dtype=torch.float32).eval()).eval()


def full_batch(rank: Rank, *, velocities: bool = False) -> Any:
    """Return the whole structure as their Batch, float32, on this rank's device."""
    import torch
    from nvalchemi.data import AtomicData, Batch

    positions, numbers, cell = structure(rank.args.cells)
    data = AtomicData(
        positions=torch.tensor(positions, dtype=torch.float32, device=rank.device),
        atomic_numbers=torch.tensor(numbers, dtype=torch.long, device=rank.device),
        cell=torch.tensor(cell, dtype=torch.float32, device=rank.device).unsqueeze(0),
        pbc=torch.ones(1, 3, dtype=torch.bool, device=rank.device),
    )
    if velocities:
        noise = torch.randn(positions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        # 300 K: sqrt(kT) in eV^1/2, over sqrt(mass in u): their unit of velocity is A over sqrt(A^2 u / eV)
        speed = (8.617e-5 * 300.0) ** 0.5 / data.atomic_masses.float().sqrt().unsqueeze(1)
        data.add_node_property("velocities", noise.to(rank.device) * speed)
    return Batch.from_data_list([data], device=rank.device)


class Sharded:
    """Their evaluation over ranks: halo exchange, neighbour list, model, each step anew."""

    def __init__(self, rank: Rank, wrapper: Any, config: Any, stack: ExitStack) -> None:
        import torch
        from nvalchemi.distributed.distributed_model import DistributedModel
        from nvalchemi.distributed.sharded_batch import ShardedBatch

        self.rank, self.neighbors = rank, wrapper.model_config.neighbor_config
        batch = full_batch(rank)
        self.model = stack.enter_context(DistributedModel(wrapper, config, compile=config.compile))
        self.state = ShardedBatch.from_batch(batch if rank.index == 0 else None, config.mesh, config, src=0)
        self.positions = self.state.positions.to_local()
        # which atoms these are: the scatter keeps the order within a rank
        owner = self.state.partitioner.assign_atoms_to_ranks(batch.positions)
        self.atoms = torch.nonzero(owner == rank.index).flatten()
        if not torch.equal(batch.positions[self.atoms], self.positions):
            raise RuntimeError("the rows of this rank aren't those that the partitioner names")

    def evaluate(self) -> tuple[Any, float]:
        """Return the forces of this rank's atoms and the energy of all."""
        import torch
        from nvalchemi.distributed.particle_halo import halo_exchange
        from nvalchemi.neighbors import compute_neighbors

        self.model._ensure_initialized(self.state)
        halo_exchange(self.state, self.model._halo_config, compute_forces=True)
        self.rank.mark()
        with torch.no_grad():
            compute_neighbors(self.state.padded_batch, config=self.neighbors)
        self.rank.mark()
        out = self.model(self.state)
        return out["forces"].detach(), float(out["energy"].detach().sum())

    def rows(self) -> int:
        return int(self.state.halo_meta.n_padded)


class Whole:
    """Their evaluation in one process."""

    def __init__(self, rank: Rank, wrapper: Any) -> None:
        import torch

        self.rank, self.wrapper = rank, wrapper
        self.batch = full_batch(rank)
        self.positions = self.batch.positions
        self.atoms = torch.arange(len(self.positions), device=rank.device)

    def evaluate(self) -> tuple[Any, float]:
        """Return the forces and the energy."""
        import torch
        from nvalchemi.neighbors import compute_neighbors

        self.rank.mark()  # no halo
        with torch.no_grad():
            compute_neighbors(self.batch, config=self.wrapper.model_config.neighbor_config)
        self.rank.mark()
        out = self.wrapper(self.batch)
        return out["forces"].detach(), float(out["energy"].detach().sum())

    def rows(self) -> int:
        return len(self.positions)


def evaluations(rank: Rank, wrapper: Any, config: Any) -> None:
    """Time energies and forces of atoms that move a little each step; the first is compared with the reference."""
    import numpy as np
    import torch

    with ExitStack() as stack:
        rank.stage("partition" if config else "batch")
        system = Sharded(rank, wrapper, config, stack) if config else Whole(rank, wrapper)
        rank.stage("first evaluation")
        forces, energy = system.evaluate()
        rank.result |= {"atoms": 8 * int(np.prod(rank.args.cells)), "owned": len(system.atoms)}
        rank.result |= {"padded": system.rows(), "energy": energy, "max_abs_force": float(forces.abs().max())}
        if rank.args.reference:
            bare = torch.tensor(np.load(rank.args.reference), device=forces.device)[system.atoms]
            rank.result["max_abs_dF"] = float((forces.double() - bare.double()).abs().max())
        noise = torch.Generator(device=rank.device).manual_seed(rank.index)

        def step() -> None:
            with torch.no_grad():
                move = torch.randn(system.positions.shape, generator=noise, device=rank.device)
                system.positions.add_(move, alpha=JITTER)
            system.evaluate()

        times = rank.timed(step, "evaluation", rank.args.warm_up)
        rank.result |= {"ms": times, "peak_gb": rank.peak_gb()}
        rank.stage("evaluations measured")


def dynamics(rank: Rank, wrapper: Any, config: Any, list_skin: float) -> list[list[float]]:
    """Time whole NVE steps of their DomainParallel, set up as in their distributed examples."""
    from nvalchemi.distributed import DomainParallel
    from nvalchemi.dynamics import NVE
    from nvalchemi.dynamics.base import DynamicsStage
    from nvalchemi.hooks import NeighborListHook

    name = f"dynamics, list skin {list_skin}"
    rank.stage(f"{name}: set up")
    neighbors = wrapper.model_config.neighbor_config
    listing = NeighborListHook(neighbors, skin=list_skin, stage=DynamicsStage.BEFORE_COMPUTE)
    nve = NVE(model=wrapper, dt=FEMTOSECONDS, hooks=[listing])
    with DomainParallel(dynamics=nve, config=config) as parallel:
        rank.stage(f"{name}: partition")
        state = [parallel.partition(full_batch(rank, velocities=True) if rank.index == 0 else None)]

        def step() -> None:
            state[0], _ = parallel.step(state[0])

        return rank.timed(step, name, rank.args.warm_up)


def all_dynamics(rank: Rank, wrapper: Any, config: Any) -> None:
    """Run `dynamics` with each skin of the list; without the compiler where that fails."""
    import torch

    times: dict[str, list[list[float]]] = rank.result.setdefault("ms_md", {})
    for skin in rank.args.list_skin:
        try:
            times[f"{skin:g}"] = dynamics(rank, wrapper, config, skin)
        except Exception as error:
            if is_memory(error):
                raise
            traceback.print_exc()
            rank.result["md_note"] = f"without torch.compile, with it: {type(error).__name__}: {error}"[:2000]
        if f"{skin:g}" not in times:
            # their list hook is compiled by Inductor, which wants Triton and a C compiler on the machine
            torch.compiler.set_stance("force_eager")
            times[f"{skin:g}"] = dynamics(rank, wrapper, config, skin)
        rank.result["peak_gb_md"] = rank.peak_gb()
        rank.stage("dynamics measured")


def measure(rank: Rank) -> None:
    """Measure on one rank."""
    import torch

    rank.stage("join the other ranks")
    with group(rank) as mesh:
        rank.stage("import nvalchemi")
        import nvalchemi
        from nvalchemi.distributed import DomainConfig

        rank.result.update(version=nvalchemi.__version__, torch=torch.__version__)
        rank.stage("load the model")
        wrapper = load(rank)
        config = None
        if mesh is not None:
            config = DomainConfig(
                cutoff=float(wrapper.cutoff), skin=rank.args.skin, mesh=mesh, compile=rank.args.compile
            )
        if rank.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        evaluations(rank, wrapper, config)
        if config is not None and rank.args.dynamics:
            all_dynamics(rank, wrapper, config)
        rank.stage("leave")
    rank.stage("done")


def on_rank(index: int, args: argparse.Namespace, folder: str) -> None:
    """Measure; a failure ends in this rank's result."""
    os.dup2(2, 1)  # Warp greets on stdout, where only the result belongs
    os.environ.update(RANK=str(index), LOCAL_RANK=str(index), WORLD_SIZE=str(args.ranks))
    rank = Rank(index, args, Path(folder))
    try:
        measure(rank)
    except Exception as error:
        rank.result |= {"error": traceback.format_exc(), "memory": is_memory(error), "failed": time.time()}
        rank.save()
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # leaving the group would wait for ranks that wait for this one


def run(args: argparse.Namespace, folder: Path) -> str:
    """Run the ranks; returns why they ended, empty where all went well."""
    from torch.multiprocessing.spawn import spawn

    context = spawn(on_rank, (args, str(folder)), args.ranks, join=False)
    deadline = time.monotonic() + args.timeout
    try:
        while not context.join(timeout=1.0, grace_period=10.0):
            if time.monotonic() > deadline:
                return f"timed out after {args.timeout} s"
    except Exception as error:
        return str(error)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return ""


def slowest(ranks: list[list[list[float]]]) -> list[float]:
    """Return each step's time, all parts, on its slowest rank."""
    return [max(map(sum, step)) for step in zip(*ranks, strict=True)]


def report(args: argparse.Namespace, ended: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the ranks' results together: a step takes as long as on the slowest rank."""
    out: dict[str, Any] = {"peer": "nvalchemi-toolkit", "ranks": args.ranks, "skin": args.skin}
    out |= {
        key: ranks[0][key] for key in ("version", "torch", "atoms", "energy", "md_note") if key in ranks[0]
    }
    for key in ("owned", "padded", "peak_gb", "peak_gb_md", "max_abs_force"):
        if any(key in r for r in ranks):
            out[key] = [r.get(key) for r in ranks]
    if all("ms" in r for r in ranks):
        out["ms_all"] = slowest([r["ms"] for r in ranks])
        out["ms"] = statistics.median(out["ms_all"])
        out["ms_parts"] = [[statistics.median(part) for part in zip(*r["ms"], strict=True)] for r in ranks]
    skins = [skin for skin in ranks[0].get("ms_md", {}) if all(skin in r.get("ms_md", {}) for r in ranks)]
    if skins:
        out["ms_md_all"] = {skin: slowest([r["ms_md"][skin] for r in ranks]) for skin in skins}
        out["ms_md"] = min(statistics.median(times) for times in out["ms_md_all"].values())
    if all("max_abs_dF" in r for r in ranks):
        out["max_abs_dF_vs_bare"] = max(r["max_abs_dF"] for r in ranks)
    # the first to fail knows why; the others only miss it
    failed = sorted((r for r in ranks if "error" in r), key=lambda r: float(r["failed"]))
    if failed or ended:
        why = failed[0]["error"] if failed else ended
        memory = any(r["memory"] for r in failed)
        # where the evaluations are there, only the dynamics failed
        out["md_error" if "ms" in out else "error"] = "out of memory" if memory else why
        out["stages"] = [r.get("stage") for r in ranks]
    return out


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a mace-torch model, saved whole by torch.save")
    parser.add_argument("--cells", type=int, nargs=3, default=[8, 8, 16])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--reference", default="", help="forces in atom order, .npy")
    parser.add_argument("--skin", type=float, default=0.5, help="of the halo, A; 0.5 in their examples")
    parser.add_argument(
        "--list-skin", type=float, nargs="+", default=[0.5, 0.0], help="in dynamics, each in turn"
    )
    parser.add_argument("--no-dynamics", dest="dynamics", action="store_false")
    parser.add_argument("--compile", action="store_true", help="their compiled forward, off by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for everything")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = run(args, folder)
        paths = [folder / f"rank_{index}.json" for index in range(args.ranks)]
        ranks = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    result = report(args, ended, ranks)
    print(json.dumps(result))
    sys.exit(0 if result.get("error") in {None, "out of memory"} else 1)


if __name__ == "__main__":
    main()
