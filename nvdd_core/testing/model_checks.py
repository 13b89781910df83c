"""Checks of a model in one process: derivatives, state, copies, precision.

Each takes a model (or whatever `ModelSource` takes) and structures. Invariant: a reference is a difference
quotient, another precision or another object, never the result itself. Layer: testing.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import ase
import numpy as np
import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import InputError
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, ShardedBatch
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.evaluation import (
    Evaluated,
    Watched,
    compare_all,
    evaluate,
    need_forces,
    outputs_for,
)
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check
from nvdd_core.testing.process import run_fresh
from nvdd_core.testing.tolerances import EXACT, SINGLE, SLOPE, Array, Tolerance, compare

_STEP: Final = 2e-6  # of a difference quotient, in cutoffs and as a strain
_HIGHEST_NUMBER: Final = 118


# -- derivatives -------------------------------------------------------------------------------------


@check
def assert_forces_match_finite_differences(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = SLOPE, where: str = "the structure"
) -> None:
    """Check forces against difference quotients of the energy: along two directions of all atoms, and one atom's.

    The energy is evaluated in the model's dtype, which should be float64.
    """
    model = ModelSource.of(model).load()
    forces = evaluate(model, atoms, {"energy", "forces"}).forces
    h = _STEP * model.cutoff
    largest = int(np.argmax(np.abs(forces)))
    alone = np.zeros(forces.size)
    alone[largest] = 1.0
    for name, line in {**_directions(forces.shape), f"atom {largest // 3}": alone}.items():
        step = h * line.reshape(forces.shape)
        up, down = (_energy(model, _moved(atoms, sign * step)) for sign in (1.0, -1.0))
        compare(
            f"forces on {where} along {name}, against -dE/dx",
            float((forces.ravel() * line).sum()),
            -(up - down) / (2.0 * h),
            tolerance,
            slack=tolerance.relative * float(np.linalg.norm(forces)) + _rounding(up, h),
        )


@check
def assert_stress_matches_finite_differences(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = SLOPE, where: str = "the structure"
) -> None:
    """Check the stress against difference quotients of the energy under two symmetric strains."""
    model = ModelSource.of(model).load()
    found = evaluate(model, atoms, {"energy", "stress"}).stress
    if found is None:
        raise ConformanceError(f"the model gives no stress for {where}, though it was asked for")
    volume = abs(float(np.linalg.det(atoms.cell.array)))
    h = _STEP
    compare(f"stress of {where}, transposed", found[0].T, found[0], SLOPE)
    for name, line in _directions((3, 3)).items():
        strain = 0.5 * (line.reshape(3, 3) + line.reshape(3, 3).T)
        up, down = (_energy(model, _strained(atoms, sign * h * strain)) for sign in (1.0, -1.0))
        compare(
            f"stress of {where} under {name}, against (1/V) dE/d(strain)",
            float((found[0] * strain).sum()),
            (up - down) / (2.0 * h * volume),
            tolerance,
            slack=tolerance.relative * float(np.linalg.norm(found[0])) + _rounding(up, h * volume),
        )


def _directions(shape: tuple[int, ...]) -> dict[str, Array]:
    """Two unit directions in which no component is special."""
    k = np.arange(int(np.prod(shape)), dtype=np.float64)
    lines = {"direction 1": np.sin(1.0 + 2.3 * k), "direction 2": np.cos(0.4 + 3.1 * k * k)}
    return {name: line / np.linalg.norm(line) for name, line in lines.items()}


def _rounding(energy: float, h: float) -> float:
    """What the last digits of two energies can do to their difference quotient."""
    return 16.0 * float(np.finfo(np.float64).eps) * abs(energy) / h


def _energy(model: Any, atoms: ase.Atoms) -> float:
    return float(evaluate(model, atoms, {"energy"}).energy[0])


def _moved(atoms: ase.Atoms, step: Array) -> ase.Atoms:
    moved = atoms.copy()
    moved.positions = moved.positions + step
    return moved


def _strained(atoms: ase.Atoms, strain: Array) -> ase.Atoms:
    changed = atoms.copy()
    changed.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return changed


# -- precision and elements ----------------------------------------------------------------------------


@check
def assert_float32_close_to_float64(
    source: Any, atoms: ase.Atoms, tolerance: Tolerance = SINGLE, where: str = "the structure"
) -> None:
    """Check that a model loaded in float32 says so, and gives nearly what it gives in float64."""
    source = ModelSource.of(source)
    single = source.load(torch.float32)
    if single.dtype != torch.float32:
        raise ConformanceError(f"loaded with dtype=torch.float32, the model says dtype {single.dtype}")
    compare_all(f"{where} in float32", evaluate(single, atoms), evaluate(source.load(), atoms), tolerance)


@check
def assert_unknown_element_refused(model: Any, atoms: ase.Atoms) -> None:
    """Check that an element without parameters is an InputError that names it, not a number."""
    model = ModelSource.of(model).load()
    known = {n for n in range(1, _HIGHEST_NUMBER + 1) if _accepts(model, n)}
    unknown = sorted(set(range(1, _HIGHEST_NUMBER + 1)) - known)
    if not unknown:
        raise NotApplicable("the model's check accepts every element")
    if missing := sorted(set(atoms.numbers.tolist()) - known):
        raise ConformanceError(
            f"the model's check refuses atomic number {missing[0]}, which the structures have; set `symbol`"
        )
    changed = atoms.copy()
    changed.numbers[-1] = unknown[-1]
    symbol = ase.data.chemical_symbols[unknown[-1]]
    try:
        evaluate(model, changed, {"energy"})
    except InputError as error:
        text = str(error)
        if str(len(atoms) - 1) not in text and symbol not in text:
            raise ConformanceError(
                f"the message for an unknown element names neither the atom nor {symbol}: {text!r}"
            ) from error
        return
    raise ConformanceError(
        f"the model's check refuses {symbol}, yet a structure with it was evaluated without an error"
    )


def _accepts(model: Any, number: int) -> bool:
    try:
        model.check(torch.tensor([number]), torch.tensor([0]))
    except InputError:
        return False
    return True


# -- state -----------------------------------------------------------------------------------------------


@check
def assert_deterministic(source: Any, atoms: ase.Atoms, where: str = "the structure") -> None:
    """Check that the same model, and the same model loaded again, give the same bits."""
    source = ModelSource.of(source)
    model = source.load()
    first = evaluate(model, atoms)
    compare_all(f"{where}, evaluated again", evaluate(model, atoms), first, EXACT)
    compare_all(f"{where}, model loaded again", evaluate(source.load(), atoms), first, EXACT)


@check
def assert_inputs_untouched(model: Any, atoms: ase.Atoms, where: str = "the structure") -> None:
    """Check that forward changes no tensor of the batch it gets, nor the caller's atoms."""
    watched = Watched(ModelSource.of(model).load())
    before = atoms.copy()
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single("cpu"))
    positions = sharded.positions[torch.argsort(sharded.ids)].clone()
    DistributedModel(watched, DomainConfig())(sharded, outputs_for(watched, atoms))
    if watched.changed:
        raise ConformanceError(
            f"forward changed {', '.join(dict.fromkeys(watched.changed))} of the batch of {where}; work on copies"
        )
    if not torch.equal(sharded.positions[torch.argsort(sharded.ids)], positions) or atoms != before:
        raise ConformanceError(f"an evaluation changed the positions of {where}")


@check
def assert_results_do_not_alias(model: Any, atoms: ase.Atoms, where: str = "the structure") -> None:
    """Check that a second result shares no storage with the first and that neither keeps a graph."""
    model = ModelSource.of(model).load()
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single("cpu"))
    distributed = DistributedModel(model, DomainConfig(skin=0.2 * model.cutoff))
    wanted = outputs_for(model, atoms)
    first = distributed(sharded, wanted).named()
    kept = {name: tensor.clone() for name, tensor in first.items()}
    sharded.positions.add_(1e-3 * model.cutoff * torch.sin(torch.arange(3.0, dtype=torch.float64)))
    sharded.positions[0].add_(2e-3 * model.cutoff)
    second = distributed(sharded, wanted).named()
    for name, tensor in first.items():
        if tensor.grad_fn is not None or tensor.requires_grad:
            raise ConformanceError(f"'{name}' of {where} keeps its graph; detach results")
        if not torch.equal(tensor, kept[name]):
            raise ConformanceError(
                f"the next evaluation changed '{name}' of {where}, which was returned before"
            )
        if (
            tensor.numel()
            and tensor.untyped_storage().data_ptr() == second[name].untyped_storage().data_ptr()
        ):
            raise ConformanceError(
                f"two results share the storage of '{name}' on {where}; return new tensors"
            )


def global_state() -> dict[str, str]:
    """Return the process-wide settings that a model has to leave alone, as text."""
    return {
        "torch default dtype": str(torch.get_default_dtype()),
        "torch default device": str(torch.get_default_device()),
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "number of threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "anomaly mode": str(torch.is_anomaly_enabled()),
        "TF32 of matmul": str(torch.backends.cuda.matmul.allow_tf32),
        "TF32 of cuDNN": str(torch.backends.cudnn.allow_tf32),
        "numpy print options": str(np.get_printoptions()),
        "numpy error handling": str(np.geterr()),
    }


@check
def assert_global_state_kept(source: Any, atoms: ase.Atoms, float32: bool = True) -> None:
    """Check in a new process that loading and evaluating, in float64 and with `float32` in both, changes no setting."""
    source = ModelSource.of(source)
    for what, before, after in run_fresh(f"{__name__}:_states", source, atoms, float32):
        changed = [
            f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]
        ]
        if changed:
            raise ConformanceError(f"{what} changed process-wide settings: {'; '.join(changed)}")


def _states(
    source: ModelSource, atoms: ase.Atoms, float32: bool
) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """Load and evaluate, noting settings before and after each; runs in the new process."""
    found = []
    before = global_state()
    for dtype in (torch.float64, torch.float32) if float32 else (torch.float64,):
        model = source.load(dtype)
        loaded = global_state()
        evaluate(model, atoms)
        after = global_state()
        found += [
            (f"loading the model in {dtype}", before, loaded),
            (f"evaluating it in {dtype}", loaded, after),
        ]
        before = after
    return found


# -- copies and files ----------------------------------------------------------------------------------------


@check
def assert_copies_agree(source: Any, atoms: ase.Atoms, where: str = "the structure") -> None:
    """Check that pickles and deep copies, made before and after an evaluation, give the same bits everywhere."""
    model = ModelSource.of(source).load()
    copies = {"before": _copies(model)}
    expected = evaluate(model, atoms)
    copies["after"] = _copies(model)
    for when, (pickled, copied) in copies.items():
        for how, text in (("pickled", pickled), ("deep-copied", copied)):
            what = f"{where}, model {how} {when} an evaluation"
            compare_all(what, evaluate(pickle.loads(text), atoms), expected, EXACT)
    elsewhere = run_fresh(f"{__name__}:_evaluate_pickled", copies["after"][0], atoms)
    compare_all(f"{where}, model pickled into a new process", elsewhere, expected, EXACT)
    _check_shared(model)


def _copies(model: Any) -> tuple[bytes, bytes]:
    return pickle.dumps(model), pickle.dumps(copy.deepcopy(model))


def _check_shared(model: Any) -> None:
    """Check that a deep copy of a torch module has parameters and buffers of its own."""
    if not isinstance(model, torch.nn.Module):
        return
    twin = copy.deepcopy(model)
    pairs = [
        (model.named_parameters(), twin.named_parameters()),
        (model.named_buffers(), twin.named_buffers()),
    ]
    for ours, theirs in pairs:
        other = dict(theirs)
        for name, tensor in ours:
            if tensor.numel() and name in other and tensor.data_ptr() == other[name].data_ptr():
                raise ConformanceError(f"a deep copy of the model shares '{name}' with the original")


def _evaluate_pickled(model: bytes, atoms: ase.Atoms) -> Evaluated:
    return evaluate(pickle.loads(model), atoms)


class _Planted:
    """Writes a file when it is unpickled by a loader that runs what it finds."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.marker),)


@check
def assert_checkpoint_is_safe(
    loader: Any, checkpoint: str, option: str = "", options: Mapping[str, Any] | None = None
) -> None:
    """Check that a checkpoint loads with ``weights_only=True`` and that a planted file runs no code.

    Parameters
    ----------
    loader : str or callable
        As for `ModelSource`.
    checkpoint : str
        A file of the model's own format.
    option : str
        Name of the loader's option that takes such a file; without it only the file is looked at.
    options : mapping
        The loader's other options.
    """
    torch.load(checkpoint, weights_only=True, map_location="cpu")
    if not option:
        return
    # a slip in `option` would be refused as well
    ModelSource(loader, {**(options or {}), option: checkpoint}).load()
    with tempfile.TemporaryDirectory(prefix="nvdd-conformance-") as folder:
        marker, planted = Path(folder, "marker"), Path(folder, "planted.pt")
        torch.save({"planted": _Planted(str(marker))}, planted)
        try:
            ModelSource(loader, {**(options or {}), option: str(planted)}).load()
        except Exception:
            refused = True
        else:
            refused = False
        if marker.exists():
            raise ConformanceError(
                f"the loader ran code from the file given as '{option}'; load weights only"
            )
        if not refused:
            raise ConformanceError(f"the loader took a file that is no checkpoint as '{option}'")


def usable(
    structures: Mapping[str, ase.Atoms], *, periodic: bool = False, largest: int = 64
) -> Sequence[str]:
    """Return names of the small structures, or of all where none is small."""
    names = [n for n, atoms in structures.items() if not periodic or bool(atoms.pbc.all())]
    return [n for n in names if len(structures[n]) <= largest] or names


def feel_forces(where: str, model: Any, atoms: ase.Atoms) -> None:
    """Refuse a structure whose forces are all zero, on which most checks say nothing."""
    need_forces(where, evaluate(model, atoms, {"energy", "forces"}))
