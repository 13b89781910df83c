"""What one rank does in a validation: evaluate, record, differentiate, and hand back what can be compared.

`observe` runs alike in one process and on every rank of a pool. A rank that fails leaves what it has recorded so far
in a folder before it raises, since the error alone seldom says why.

Layer: validate.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvdd_core.adapters import AdapterStatus
from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, MLIPSpec, Model, Outputs, ShardedBatch
from nvdd_core.runtime.source import ModelSource
from nvdd_core.tensor import DispatchTrace
from nvdd_core.validate.gradients import gradients
from nvdd_core.validate.record import Recorder, Records, recording
from nvdd_core.validate.scripted import watching_scripts
from nvdd_core.validate.views import Layout

_FLAT = 1e-12  # Angstrom^3


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes
    ----------
    source : ModelSource
    batch : Batch
    config : DomainConfig
    dtype : torch.dtype
    spec : MLIPSpec or None
        None for the model's own.
    derive : set of str or None
        Outputs that are differentiated; None for all. What lacks a derivative in one process isn't tried on ranks, of
        which some might find out while others wait for them.
    record : bool
        Whether operations are recorded.
    folder : str
        Where a rank that fails leaves its records; "" for nowhere.
    """

    source: ModelSource
    batch: Batch
    config: DomainConfig
    dtype: torch.dtype
    spec: MLIPSpec | None = None
    derive: frozenset[str] | None = None
    record: bool = True
    folder: str = ""


@dataclass
class Observation:
    """What one rank found.

    Attributes
    ----------
    ids : Tensor, shape (n_local,), int64; n_owned : int
    n_global : int
    cutoff : float
        Angstrom; the model's.
    n_rows : Tensor, shape (S,), int64
        Owned rows of each system.
    spec : MLIPSpec
        The one that was used. Its adapters, which may hold code without a name, stay in the process that has them.
    edges : Tensor, shape (2, E), int64
        Sender and receiver of every directed edge into an owned row, by global id.
    rows, whole : dict of str to Tensor
        Outputs on owned rows, and outputs per system.
    gradients : dict of str to Tensor, shape (n_owned, 3), or None
    handlers : list of (op, handler, bytes)
    calls, bytes : dict of str to int
        Collectives by kind.
    adapters : list of AdapterStatus
    records : Records or None
    """

    ids: torch.Tensor
    n_owned: int
    n_global: int
    cutoff: float
    n_rows: torch.Tensor
    spec: MLIPSpec
    edges: torch.Tensor
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    handlers: list[tuple[str, str, int]] = field(default_factory=list)
    calls: Mapping[str, int] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    adapters: list[AdapterStatus] = field(default_factory=list)
    records: Records | None = None

    @property
    def owned_ids(self) -> torch.Tensor:
        """Global ids of owned rows."""
        return self.ids[: self.n_owned]

    def __getstate__(self) -> dict[str, Any]:
        plain = self.spec.distribution.replace(custom_ops=(), third_party_helpers=())
        return vars(self) | {"spec": self.spec.replace(distribution=plain)}


def observe(mesh: Mesh, request: Request) -> Observation:
    """Evaluate what `request` names on this rank (collective)."""
    model = request.source.load(request.dtype, mesh.device)
    sharded = ShardedBatch.scatter(request.batch if mesh.rank == 0 else None, mesh)
    evaluator = DistributedModel(model, request.config, mesh, spec=request.spec)
    evaluator.rebuild(sharded, check=True)
    found = _layout(evaluator, sharded)
    try:
        out = _evaluate(evaluator, sharded, request, found)
        _keep_outputs(found, out, evaluator.spec)
        wanted = wanted_outputs(model, request.batch)
        derived = gradients(evaluator, sharded, wanted if request.derive is None else wanted & request.derive)
        found.gradients = dict.fromkeys(wanted) | derived
    except BaseException as exc:
        if request.folder:
            _leave_behind(found, Path(request.folder, f"{mesh.rank}.pickle"), exc)
        raise
    return found


def _leave_behind(found: Observation, path: Path, exc: BaseException) -> None:
    """Write what was found so far; a rank that is ended meanwhile leaves no half file, and `exc` goes first."""
    try:
        data = pickle.dumps(found)
    except Exception as other:  # whatever a model's own code made of it
        exc.add_note(f"what was recorded can't be handed back: {type(other).__name__}: {other}")
        return
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def wanted_outputs(model: Model, batch: Batch) -> frozenset[str]:
    """Return all outputs of a model; the stress where every system has a volume."""
    volumes = torch.linalg.det(batch.cell).abs()
    return model.outputs if bool((volumes > _FLAT).all()) else model.outputs - {"stress"}


def _layout(evaluator: DistributedModel, sharded: ShardedBatch) -> Observation:
    domain = evaluator.domain
    n_owned = domain.plan.n_owned
    index = domain.neighbors.coo()[0]
    edges = domain.ids[index[:, index[1] < n_owned]]
    cutoff = float(evaluator.model.cutoff)
    n_rows = torch.bincount(sharded.system, minlength=sharded.n_systems).cpu()
    return Observation(
        domain.ids.cpu(), n_owned, sharded.n_global, cutoff, n_rows, evaluator.spec, edges.cpu()
    )


def _evaluate(
    evaluator: DistributedModel, sharded: ShardedBatch, request: Request, found: Observation
) -> Outputs:
    domain, mesh = evaluator.domain, evaluator.mesh
    layout = Layout(domain.ids, domain.plan.n_owned, domain.neighbors.coo()[0][1])
    before = mesh.counter.snapshot()
    with ExitStack() as stack:
        trace = stack.enter_context(DispatchTrace())
        if request.record:
            recorder = Recorder(evaluator.model, layout)
            found.records = recorder.found
            stack.enter_context(watching_scripts(recorder))
            stack.enter_context(recording(recorder))
        out = evaluator(sharded, wanted_outputs(evaluator.model, request.batch))
    tally = mesh.counter.since(before)
    found.calls, found.bytes = dict(tally.calls), dict(tally.bytes)
    found.handlers = [(r.op, r.handler, sum(r.moved.values())) for r in trace.records]
    found.adapters = list(evaluator.adapter_status())
    return out


def _keep_outputs(found: Observation, out: Outputs, spec: MLIPSpec) -> None:
    for name, value in out.named().items():
        (found.rows if spec.per_row(name) else found.whole)[name] = value.detach().cpu()
