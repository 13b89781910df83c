"""What `nvdd evaluate` and `nvdd run` do alike: form the group, load the model, read and spread atoms.

`group` yields the mesh of a command's ranks inside a fault scope, `load_model` makes the plugin's model,
`read_systems` reads a structure file, and `prepare` does all of it.

Invariant: a step that can fail on one rank only is agreed by all ranks before the next one begins.
Layer: cli.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvdd_core.cli.config import JobConfig
from nvdd_core.cli.flags import require_file
from nvdd_core.comm import Mesh, agreed, group_scope
from nvdd_core.errors import DistributedError, InputError
from nvdd_core.plugins import check_agreement, default_manager
from nvdd_core.plugins.composition import read_model
from nvdd_core.plugins.foreign import wanted_end
from nvdd_core.runtime import Batch, DistributedManager, DistributedModel, DomainConfig, Model, ShardedBatch
from nvdd_core.runtime.closest import closeness
from nvdd_core.runtime.model_api import members_of
from nvdd_core.runtime.precision import precision_note
from nvdd_core.runtime.source import ModelSource
from nvdd_core.runtime.structures import constraint_names, read_structures
from nvdd_core.spec import StrategyKind

_DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Session:
    """Everything that a command's work starts from.

    Attributes
    ----------
    mesh : Mesh
    model : DistributedModel
    sharded : ShardedBatch
        This rank's rows.
    plugins : dict of str to str
        The plugins that provide the model or its members, and their versions.
    """

    mesh: Mesh
    model: DistributedModel
    sharded: ShardedBatch
    plugins: dict[str, str]


@contextmanager
def group(job: JobConfig) -> Iterator[Mesh]:
    """Yield the mesh of this process's group; a failure in the body ends all ranks alike."""
    with DistributedManager(job.device) as manager:
        mesh = manager.mesh
        with _threads(mesh), group_scope(mesh), _exits_told(mesh):
            yield mesh


@contextmanager
def _exits_told(mesh: Mesh) -> Iterator[None]:
    """Make an error of what ends a process past every handler, ``sys.exit`` in a model for one."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as exc:
        raise DistributedError(f"rank {mesh.rank}: {wanted_end(exc)}") from exc


@contextmanager
def _threads(mesh: Mesh) -> Iterator[None]:
    """Compute with one thread on a CPU, unless OMP_NUM_THREADS says otherwise.

    A second thread gains a tenth at 32,000 atoms, nothing below, and costs half the speed and more where the
    machine has other work, since threads of one pool wait for each other by spinning. More ranks use more cores.
    """
    before = torch.get_num_threads()
    if mesh.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe(job: JobConfig, session: Session) -> str:
    """Return what computes, in words: the model, its precision, cutoff and settings, device and ranks."""
    n_ranks, told = session.mesh.size, settings(session)
    return (
        f"{job.model} ({job.dtype}, {session.mesh.device.type}, {n_ranks} rank{'' if n_ranks == 1 else 's'}), "
        f"cutoff {session.model.model.cutoff:.6g} A{f', {told}' if told else ''}"
    )


def members_report(model: DistributedModel) -> dict[str, Any]:
    """Return what a report says of a composition's members; of any other model nothing."""
    members = [
        {"name": member.name, "weight": member.weight, "cutoff": member.model.cutoff}
        for member in members_of(model.model)
    ]
    return {"members": members} if members else {}


def settings(session: Session) -> str:
    """Return what the model, or each of several, says that it chose for these systems; empty where none does."""
    model = session.model.model
    told = [getattr(part, "describe", None) for part in [m.model for m in members_of(model)] or [model]]
    return "; ".join(str(tell()) for tell in told if callable(tell))


def prepare(job: JobConfig, mesh: Mesh, read: Callable[[], Batch], skin: float = 0.0) -> Session:
    """Load the model, read the systems and spread them (collective).

    Parameters
    ----------
    job : JobConfig
    mesh : Mesh
    read : callable
        Called on rank 0 for the systems.
    skin : float
        Angstrom.

    Raises
    ------
    InputError
        When the file, the model or its options can't be used; on every rank.
    PluginMismatchError
        When the ranks see different plugins.
    """
    plugins = agreed_plugins(mesh, job.model)
    with agreed(mesh), _notes(mesh):
        model = load_model(job, mesh.device)
    with agreed(mesh), _notes(mesh):
        batch = read() if mesh.rank == 0 else None
        if batch is not None and job.dtype == "float32" and (note := precision_note(batch)):
            sys.stderr.write(f"nvdd: {note}\n")
    sharded = ShardedBatch.scatter(batch, mesh)
    config = DomainConfig(skin=skin, grid_dims=job.grid, strategy=strategy_kind(job.strategy))
    return Session(mesh, DistributedModel(model, config, mesh), sharded, plugins)


def closeness_note(session: Session) -> str:
    """Return a note for the user where two atoms are closer than any bond, after an evaluation (collective)."""
    close = closeness(session.model.domain, session.sharded)
    return f"nvdd: {close}; is the structure, or its unit of length, right?\n" if close else ""


@contextmanager
def _notes(mesh: Mesh) -> Iterator[None]:
    """Write what the body warns users of as notes, one line each, from one rank; other warnings go their way."""
    with warnings.catch_warnings(record=True) as seen:
        yield
    for warning in seen:
        if warning.category is not UserWarning:
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
    if mesh.rank == 0:
        told = [str(warning.message) for warning in seen if warning.category is UserWarning]
        sys.stderr.write("".join(f"nvdd: {' '.join(text.split())}\n" for text in dict.fromkeys(told)))


def strategy_kind(name: str) -> StrategyKind:
    """Return the strategy that a flag names."""
    return StrategyKind[name.replace("-", "_").upper()]


def agreed_plugins(mesh: Mesh, model: str) -> dict[str, str]:
    """Compare the plugins of all ranks; return those that provide `model` and their versions (collective).

    Raises
    ------
    PluginMismatchError
        When the ranks see different plugins.
    """
    manager = default_manager()
    with agreed(mesh):
        owners = {manager.provided_model(term.model).plugin: None for term in read_model(model)}
    check_agreement(mesh.all_gather_objects(manager.fingerprint(owners)))
    return {record.name: record.entry.version for owner in owners for record in manager.named(owner)}


def load_model(job: JobConfig, device: torch.device) -> Model:
    """Make the model that the job names.

    Raises
    ------
    InputError
        When no usable plugin has it, or it has no such option.
    """
    return ModelSource(job.model, job.option).load(_DTYPES[job.dtype], device)


def read_systems(path: Path, index: str, *, dynamics: bool = False) -> Batch:
    """Read systems of a file, for one evaluation or, with `dynamics`, to be moved.

    Raises
    ------
    InputError
        When ASE can't read it, it has no such system, or atoms that are meant to be held would move.
    """
    require_file(path, "structure file")
    systems = read_structures(path, index)
    held = ", ".join(constraint_names(systems))
    if held and dynamics:
        raise InputError(
            f"structure file {path}: it holds constraints ({held}), which nvdd run does not apply, so every atom "
            "would move; drop them, with atoms.set_constraint() in ASE, if that is what you want"
        )
    if held:
        sys.stderr.write(f"nvdd: forces are without the constraints of the structure file ({held})\n")
    return Batch.from_ase(systems)
