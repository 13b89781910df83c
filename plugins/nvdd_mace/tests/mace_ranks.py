"""What ranks do in the tests of nvdd-mace, and the oracle; workers import this module by name."""

from __future__ import annotations

from dataclasses import dataclass, field

import ase
import numpy as np
import torch
import torch.distributed as dist

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.spec import StrategyKind
from nvdd_mace.model import load

_MODELS = {}
_MESHES = {}


def on_some(mesh: Mesh, world, function, *args):
    """Call a function of this module on the first `world` ranks; one pool serves every test."""
    if world not in _MESHES:
        group = dist.new_group(list(range(world)))  # all ranks make it
        single = world == 1
        if mesh.rank < world:
            _MESHES[world] = Mesh.single("cpu") if single else Mesh.from_process_group(group, "cpu")
        else:
            _MESHES[world] = None
    return None if _MESHES[world] is None else globals()[function](_MESHES[world], *args)


@dataclass
class Job:
    atoms: ase.Atoms | list
    strategy: str = "halo"
    skin: float = 0.0
    moves: tuple = ()  # displacements of each further evaluation
    outputs: frozenset | None = None
    capture: str = "off"


@dataclass
class Found:
    """One rank's share of one evaluation, or of all."""

    ids: np.ndarray
    energy: np.ndarray
    forces: np.ndarray
    node_energy: np.ndarray
    stress: np.ndarray | None
    owned: int = 0
    ghosts: int = 0
    calls: dict = field(default_factory=dict)
    sent: dict = field(default_factory=dict)


def model(path, dtype="float64", dispersion=None, **options):
    """The model in a file, with DFT-D3 of a functional where one is given."""
    key = (str(path), dtype, dispersion, *sorted(options.items()))
    if key not in _MODELS:
        options.setdefault("trust", True)  # ten times as fast, and these files are ours
        where = {"dtype": getattr(torch, dtype), "device": "cpu"}
        found = load(**where, checkpoint=path, **options)
        if dispersion is not None:
            from nvdd_core.runtime import PipelineModel
            from nvdd_dftd3.model import load as load_dispersion

            found = PipelineModel({"mace": found, "dftd3": load_dispersion(**where, functional=dispersion)})
        _MODELS[key] = found
    return _MODELS[key]


def wanted(atoms):
    frames = [atoms] if isinstance(atoms, ase.Atoms) else atoms
    stress = {"stress"} if all(bool(a.pbc.all()) for a in frames) else set()
    return frozenset({"energy", "forces", "node_energy"} | stress)


def evaluate(mesh: Mesh, path, options, jobs):
    """Evaluate jobs; the last evaluation of each, whose list is kept, is the one that is counted."""
    default = torch.get_default_dtype()
    found = [_evaluate(mesh, model(path, **options), job) for job in jobs]
    assert torch.get_default_dtype() is default
    return found


def _evaluate(mesh, served, job):
    distributed = DistributedModel(
        served, DomainConfig(strategy=StrategyKind(job.strategy), skin=job.skin), mesh
    )
    sharded = ShardedBatch.scatter(Batch.from_ase(job.atoms) if mesh.rank == 0 else None, mesh)
    with distributed.steady(job.capture):
        return _evaluated(mesh, distributed, sharded, job)


def _evaluated(mesh, distributed, sharded, job):
    start = sharded.positions.clone(), sharded.ids.clone()
    names = job.outputs or wanted(job.atoms)
    out = distributed(sharded, names)
    for move in job.moves:
        n = sharded.n_global
        rest = torch.zeros(n, 3, dtype=torch.float64)
        rest[start[1]] = start[0]
        mesh.all_reduce_sum_(rest)
        sharded.positions.copy_(rest[sharded.ids] + torch.as_tensor(move)[sharded.ids])
        before = mesh.counter.snapshot()
        out = distributed(sharded, names)
        tally = mesh.counter.since(before)
    if not job.moves:
        before = mesh.counter.snapshot()
        out = distributed(sharded, names)
        tally = mesh.counter.since(before)
    plan = distributed.domain.plan
    return Found(
        sharded.ids.numpy().copy(),
        out.energy.numpy().copy(),
        out.forces.numpy().copy(),
        out.node_energy.double().numpy().copy(),
        None if out.stress is None else out.stress.numpy().copy(),
        plan.n_owned,
        plan.n_ghost,
        dict(tally.calls),
        dict(tally.bytes),
    )


def fused(mesh: Mesh, path, job):
    """Evaluate a job by a model whose convolutions gather and sum inside one call, as fused kernels do."""
    from mace.modules.wrapper_ops import with_scatter_sum

    served = load(dtype=torch.float64, device="cpu", checkpoint=path, trust=True, blockwise=False)
    for block in served.module.interactions:
        with_scatter_sum(block.conv_tp)
        block.conv_fusion = True
    return _evaluate(mesh, served, job)


def rows_seen(mesh: Mesh, path, job):
    """Evaluate a job; return what it gave, and how many rows each part of the model was given, by name."""
    served, seen = model(path), {}

    def note(name):
        def hook(module, args, kwargs, output):  # after all pre-hooks, so this is what the part works on
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            seen.setdefault(name, set()).update(t.shape[0] for t in tensors)

        return hook

    handles = [
        part.register_forward_hook(note(name), with_kwargs=True)
        for name, part in served.module.named_modules()
        if row_wise(name)
    ]
    try:
        return _evaluate(mesh, served, job), seen
    finally:
        for handle in handles:
            handle.remove()


def row_wise(name):
    """Whether a part of a model is called on rows of atoms: not on edges, nor inside another part."""
    kind, *path = name.split(".")
    if kind == "interactions":
        return len(path) == 2 and path[1] not in ("conv_tp", "conv_tp_weights", "density_fn")
    return kind in ("products", "readouts") and len(path) == 1


def joined(shares):
    """Put one evaluation's shares together in the order of atoms."""
    ids = np.concatenate([s.ids for s in shares])
    assert np.array_equal(np.sort(ids), np.arange(len(ids)))
    order = np.argsort(ids)
    rows = [np.concatenate([getattr(s, n) for s in shares])[order] for n in ("forces", "node_energy")]
    return Found(np.arange(len(ids)), shares[0].energy, *rows, shares[0].stress)


def loss_gradients(mesh: Mesh, path, options, atoms, strategy):
    """Gradients of a loss of energy, forces and stress with respect to every parameter, summed over ranks."""
    served = model(path, trainable=True, **options)
    distributed = DistributedModel(served, DomainConfig(strategy=StrategyKind(strategy)), mesh)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms) if mesh.rank == 0 else None, mesh)
    names = {"energy", "forces", "stress"}
    distributed(sharded, names)
    out = distributed.differentiable(sharded, names)
    target = torch.cos(torch.arange(3.0) + sharded.ids[:, None].double())
    loss = (out.forces - target).square().sum()
    whole = (out.energy + 1.0).square().sum() + 100.0 * out.stress.square().sum()
    loss = loss + whole * (1.0 if mesh.rank == 0 else 0.0)
    names, parameters = zip(*served.module.named_parameters(), strict=True)
    kept = [(n, p) for n, p in zip(names, parameters, strict=True) if p.requires_grad and p.numel()]
    grads = torch.autograd.grad(loss, [p for _, p in kept], allow_unused=True)
    found = {}
    for (name, p), grad in zip(kept, grads, strict=True):
        grad = torch.zeros_like(p) if grad is None else grad.clone()
        mesh.all_reduce_sum_(grad)
        found[name] = grad.numpy().copy()
    return found


def oracle(module, atoms, head=None, dtype="float64"):
    """Evaluate by mace's own ASE calculator, with torch's default dtype set as mace's training does: ZBL needs it."""
    from mace.calculators import MACECalculator
    from mace.tools.torch_tools import default_dtype

    own = {} if head is None else {"head": head}
    atoms = atoms.copy()
    atoms.calc = MACECalculator(models=module, device="cpu", default_dtype=dtype, **own)
    with default_dtype(dtype):
        energy, forces = atoms.get_potential_energy(), atoms.get_forces()
        stress = atoms.get_stress(voigt=False) if atoms.pbc.all() else None
    node_energy = atoms.calc.results["energies"]
    return Found(np.arange(len(atoms)), np.array([energy]), forces, node_energy, stress)


def compare(found, true, energy=1e-11, forces=1e-9):
    """Hold found to true; return the largest differences (of energies an atom's) and the largest force."""
    n = len(true.forces)
    off = {"energy": np.abs(found.energy - true.energy).max() / n, "stress": 0.0}
    off["largest force"] = np.abs(true.forces).max()
    assert off["energy"] < energy
    np.testing.assert_allclose(found.node_energy, true.node_energy, rtol=0, atol=max(1e-9, energy))
    np.testing.assert_allclose(found.forces, true.forces, rtol=0, atol=forces)
    off["forces"] = np.abs(found.forces - true.forces).max()
    if true.stress is not None and found.stress is not None:
        stress = found.stress.reshape(true.stress.shape)
        np.testing.assert_allclose(stress, true.stress, rtol=0, atol=forces)
        off["stress"] = np.abs(stress - true.stress).max()
    return off
