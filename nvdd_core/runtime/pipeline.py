"""Models put together: a weighted sum of energies over one halo and one neighbour list.

Key objects: `PipelineModel`, which is a model like any other, and `DistributedPipelineModel`. Members run in order on
the same local rows, each by its own spec and on the edges of its own cutoff. A member may give a quantity of each row,
such as a charge, that later members read as a field of the batch; it is exchanged once, and what they make of it
is differentiated through it.

Members whose forces are the gradient of their energy share one gradient; what members that compute forces themselves
give is added to it.

Invariant: a composition gives what its members give alone, summed, to rounding.
Layer: runtime.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nvdd_core.comm import Mesh
from nvdd_core.errors import DistributedError, NvddError, SpecError
from nvdd_core.runtime import outputs as results
from nvdd_core.runtime.batch import LocalBatch
from nvdd_core.runtime.config import DomainConfig
from nvdd_core.runtime.context import DomainContext, current_dd_context
from nvdd_core.runtime.distributed_model import DistributedModel
from nvdd_core.runtime.members import check_alike, extra_names, factors, named_members, wires_between
from nvdd_core.runtime.mlip_spec import SPEC_MPNN_HALO, ForceStrategy, MLIPSpec
from nvdd_core.runtime.model_adapters import root_module
from nvdd_core.runtime.model_api import Member, Model
from nvdd_core.runtime.spec_run import SpecRun, served
from nvdd_core.spec import (
    GatherMode,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ScatterMode,
    StrategyKind,
)
from nvdd_core.tensor.exchanges import collect_exchanges, exchanged

_ROW = OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY)
_OUTPUTS = {**SPEC_MPNN_HALO.outputs, "node_virial": _ROW}
# Members wrap their rows themselves, each by its own spec.
_STORAGE = HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.LOCAL)


class PipelineModel:
    """Several models as one: energies add up.

    Parameters
    ----------
    members : mapping of str to Model, or sequence of Model
        In the order in which they run. A sequence's members are called by their classes.
    weights : mapping of str to float, or sequence of float, optional
        Factors of the members' energies, and so of their forces and stress; default 1.
    wires : mapping of str to str, optional
        What a member gives for each row to what later members read: ``{"charges": "charges"}`` is output to field.
        ``"member/output"`` and ``"member/field"`` name one member where several could be meant. Default: an output
        called ``charges`` becomes the field ``charges`` of later members that give none; two for one are refused.

    Raises
    ------
    InputError
        When members don't fit together: other precision, other device, no such name.
    """

    def __init__(
        self,
        members: Mapping[str, Model] | Sequence[Model],
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        wires: Mapping[str, str] | None = None,
    ) -> None:
        named = dict(members) if isinstance(members, Mapping) else named_members(members)
        weighted = factors(tuple(named), weights)
        self.members = tuple(Member(name, model, weighted[name]) for name, model in named.items())
        check_alike(self.members)
        self._extras = extra_names(self.members)
        self.wires = wires_between(self.members, wires)
        self._runs: dict[StrategyKind, tuple[SpecRun, ...]] = {}

    # -- the model contract ---------------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """The widest, Angstrom."""
        return max(float(member.model.cutoff) for member in self.members)

    @property
    def layers(self) -> int:
        """The most."""
        return max(member.model.layers for member in self.members)

    @property
    def neighbor_form(self) -> str:
        """A half list where a member takes one: the full one is derived from it."""
        return "half" if any(m.model.neighbor_form == "half" for m in self.members) else "full"

    @property
    def dtype(self) -> torch.dtype:
        """Of all members."""
        return self.members[0].model.dtype

    @property
    def device(self) -> torch.device:
        """Of all members."""
        return torch.device(self.members[0].model.device)

    @property
    def outputs(self) -> frozenset[str]:
        """What all members give, and what each gives of its own; ``member/name`` where names clash."""
        shared = frozenset.intersection(*(frozenset(member.model.outputs) for member in self.members))
        return (shared & frozenset(results.OUTPUTS)) | self._extras.keys()

    @property
    def module(self) -> torch.nn.ModuleDict:
        """The torch modules of the members that have one."""
        roots = {member.name: root_module(member.model) for member in self.members}
        return torch.nn.ModuleDict(
            {name.replace(".", "_"): root for name, root in roots.items() if root is not None}
        )

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return the members' specs, composed by ``|``.

        Scatter modes are left to the members, each of which runs by its own.

        Raises
        ------
        SpecError
            Naming the member that can't be run so.
        """
        specs = [run.spec for run in self._runs_for(strategy)]
        merged = functools.reduce(operator.or_, specs)
        forces = {spec.force_strategy for spec in specs}
        extras = {public: specs[i].output(own) for public, (i, own) in self._extras.items()}
        return merged.replace(
            distribution=merged.distribution.replace(storage=_STORAGE, system_reductions=False),
            outputs={**_OUTPUTS, **extras},
            force_strategy=forces.pop() if len(forces) == 1 else ForceStrategy.MIXED,
            compile_policy=merged.compile_policy.replace(
                supported=all(spec.compile_policy.supported for spec in specs),
                # what one member needs to be captured, padded rows, another does not take
                capture=all(spec.compile_policy.capture for spec in specs)
                and len({spec.compile_policy.pads for spec in specs}) == 1,
                pads=all(spec.compile_policy.pads for spec in specs),
            ),
        )

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Raise InputError for the first member that lacks an element."""
        for member in self.members:
            with _told_by(member):
                member.model.check(numbers, ids)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Evaluate every member and add up what they give; see `Model.forward`."""
        context = current_dd_context()
        runs = self._runs_for(context.strategy)
        # a member masks by distance in any case, so the list of all is right for it, too
        lists = batch.parts or (batch.neighbors,) * len(runs)
        fields: list[dict[str, torch.Tensor]] = [dict(batch.fields) for _ in runs]
        sums = _Sums(batch, context)
        for i, (member, run, neighbors) in enumerate(zip(self.members, runs, lists, strict=True)):
            asked = self._asked(i, batch.requested)
            mine = replace(batch, neighbors=neighbors, parts=(), fields=fields[i], requested=asked)
            with _told_by(member):
                found = _evaluated(run, mine, context)
            sums.add(found, run.spec, member.weight)
            for public, (source, own) in self._extras.items():
                if source == i and public in batch.requested:
                    sums.extra[public] = found[own]
            self._feed(i, found, run.spec, mine, fields)
        return sums.named()

    __call__ = forward

    def _feed(
        self,
        i: int,
        found: Mapping[str, torch.Tensor],
        spec: MLIPSpec,
        batch: LocalBatch,
        fields: list[dict[str, torch.Tensor]],
    ) -> None:
        """Hand on what others read of member `i`, ghosts' values as their owners have them (collective)."""
        context = current_dd_context()
        for wire in self.wires:
            if wire.source == i:
                rows = _local_rows(_owned(wire.output, found[wire.output], spec, batch, context), context)
                for reader in wire.readers:
                    fields[reader][wire.field] = rows

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to runs of this process."""
        return {**self.__dict__, "_runs": {}}

    # -- parts ----------------------------------------------------------------------------------------------

    def _runs_for(self, strategy: StrategyKind) -> tuple[SpecRun, ...]:
        if strategy not in self._runs:
            self._runs[strategy] = tuple(self._run(member, strategy) for member in self.members)
            self._check_wires(self._runs[strategy])
        return self._runs[strategy]

    def _run(self, member: Member, strategy: StrategyKind) -> SpecRun:
        with _told_by(member):
            return SpecRun(member.model, served(member.model.distribution_spec(strategy), strategy))

    def _check_wires(self, runs: Sequence[SpecRun]) -> None:
        """Refuse what would lose a derivative."""
        for wire in self.wires:
            source, spec = self.members[wire.source], runs[wire.source].spec
            if spec.output(wire.output).kind is not OutputKind.PER_NODE:
                raise SpecError(
                    f"member '{source.name}' declares its output '{wire.output}' as "
                    f"{spec.output(wire.output).kind.value}: only what is declared per_node can be handed on"
                )
            for name, run in [(source.name, runs[wire.source])] + [
                (self.members[i].name, runs[i]) for i in sorted(wire.readers)
            ]:
                if run.spec.force_strategy is not ForceStrategy.AUTOGRAD:
                    raise SpecError(
                        f"member '{name}' computes forces itself, so the forces would lack what '{wire.output}' of "
                        f"'{source.name}' adds to them through '{wire.field}'; leave the wire out, or use a member "
                        "whose forces are the gradient of its energy"
                    )

    def _asked(self, i: int, requested: frozenset[str]) -> frozenset[str]:
        """Return what member `i` has to give."""
        own = {own for public, (source, own) in self._extras.items() if source == i and public in requested}
        wired = {wire.output for wire in self.wires if wire.source == i}
        return (requested & frozenset(results.OUTPUTS)) | own | wired


class DistributedPipelineModel(DistributedModel):
    """A composition, evaluated over the ranks of a mesh; see `PipelineModel` and `DistributedModel`."""

    def __init__(
        self,
        members: Mapping[str, Model] | Sequence[Model],
        config: DomainConfig | None = None,
        mesh: Mesh | None = None,
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        wires: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(PipelineModel(members, weights=weights, wires=wires), config, mesh)


class _Sums:
    """Weighted sums of the members' results, in float64 on owned rows."""

    def __init__(self, batch: LocalBatch, context: DomainContext) -> None:
        self._batch, self._context = batch, context
        self._rows: dict[str, torch.Tensor] = {}
        self._whole: dict[str, torch.Tensor] = {}
        self.extra: dict[str, torch.Tensor] = {}

    def add(self, found: Mapping[str, torch.Tensor], spec: MLIPSpec, weight: float) -> None:
        """Add one member's results."""
        batch, plan = self._batch, self._context.plan
        direct = spec.force_strategy is not ForceStrategy.AUTOGRAD
        for name in ("node_energy", "node_virial", *(("forces",) if direct else ())):
            if name in found:
                rows = _owned(name, found[name], spec, batch, self._context).double()
                rows = rows if weight == 1.0 else weight * rows
                self._rows[name] = self._rows[name] + rows if name in self._rows else rows
        if "energy" in found and "node_energy" not in found:
            self._add_whole("energy", weight * results.system_share("energy", found["energy"], spec, plan))
        if direct and "virial" in found:
            self._add_whole("virial", weight * results.system_share("stress", found["virial"], spec, plan))

    def _add_whole(self, name: str, share: torch.Tensor) -> None:
        self._whole[name] = self._whole[name] + share if name in self._whole else share

    def named(self) -> dict[str, torch.Tensor]:
        """Return everything by name: energies of rows where every member gave some, else of systems."""
        batch = self._batch
        energy = "energy" if "energy" in self._whole else "node_energy"
        if energy == "energy" and "node_energy" in self._rows:
            system = batch.system[: batch.n_owned]
            share = results.by_system(self._rows.pop("node_energy"), system, batch.n_systems)
            self._add_whole("energy", share)
        named = {**self._rows, **self._whole, **self.extra}
        if energy in named and torch.is_grad_enabled():
            # members without a neighbour on this rank may have constants, which their own check has allowed
            named[energy] = named[energy] + batch.positions.reshape(-1)[:0].sum()
        return named


def _evaluated(run: SpecRun, batch: LocalBatch, context: DomainContext) -> dict[str, torch.Tensor]:
    """Run a member; one that computes forces itself sees rows without a graph, as it would alone."""
    if run.spec.force_strategy is not ForceStrategy.AUTOGRAD:
        with torch.no_grad(), collect_exchanges():  # those of a graph of its own are not the evaluation's
            bare = replace(batch, positions=batch.positions.detach(), cell=batch.cell.detach())
            return run.forward(bare)
    found = run.forward(batch)
    energy = found["node_energy"] if "node_energy" in found else found["energy"]
    derived = batch.positions.requires_grad and torch.is_grad_enabled()
    if derived and not energy.requires_grad and bool(energy.any()):  # a model of charges alone has no energy
        results.refuse_detached(0 if context.mesh is None else context.mesh.rank, batch.neighbors.n_edges)
    return found


def _owned(
    name: str, value: torch.Tensor, spec: MLIPSpec, batch: LocalBatch, context: DomainContext
) -> torch.Tensor:
    """Return owned rows of a member's result (collective where they are shares)."""
    if context.plan is None:
        return value[: batch.n_owned]
    return results.owned_rows(name, value, spec, context.plan)


def _local_rows(owned: torch.Tensor, context: DomainContext) -> torch.Tensor:
    """Give ghosts their owners' values, under a wide halo, too: its outer ghosts lack neighbours (collective)."""
    return owned if context.plan is None else exchanged(context.plan.forward, owned)


@contextmanager
def _told_by(member: Member) -> Iterator[None]:
    """Name the member in what is raised in the body; what all ranks share is nobody's own."""
    try:
        yield
    except DistributedError:
        raise
    except NvddError as exc:
        raise type(exc)(f"member '{member.name}': {exc}") from exc
