"""A model together with the spec that it runs by: what it is handed, and what of its results is taken.

Key object: `SpecRun`, of which a `DistributedModel` has one, and a composition one for each member.

Invariant: a result that doesn't fit what the spec declares is refused on the rank that has it.
Layer: runtime.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from nvdd_core.comm import HaloPlan
from nvdd_core.errors import SpecError
from nvdd_core.runtime import outputs as results
from nvdd_core.runtime.batch import LocalBatch
from nvdd_core.runtime.context import DomainContext, current_dd_context, enter_context
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.runtime.model_api import Model
from nvdd_core.spec import HaloStorage, StrategyKind
from nvdd_core.tensor import RowKind, ScatterMode, ShardTensor


def served(spec: MLIPSpec, strategy: StrategyKind) -> MLIPSpec:
    """Return `spec` for the strategy of the run, which is what counts.

    Raises
    ------
    SpecError
        When it asks for a storage that models are not run on.
    """
    storage = spec.distribution.storage
    if not isinstance(storage, HaloStorage):
        raise SpecError(
            f"the model's spec asks for {type(storage).__name__}; models are run on HaloStorage only, so far"
        )
    if strategy is StrategyKind.WIDE_HALO:  # ghosts are computed in full: nothing is exchanged, nor corrected
        storage = storage.replace(scatter=ScatterMode.LOCAL)
    return spec.replace(distribution=spec.distribution.replace(strategy=strategy, storage=storage))


class SpecRun:
    """Runs a model by a spec on the local rows of the evaluation under way.

    Parameters
    ----------
    model : Model
    spec : MLIPSpec
        As `served` gives it.
    """

    def __init__(self, model: Model, spec: MLIPSpec) -> None:
        self.model, self.spec = model, spec
        self._checked: tuple[HaloPlan, frozenset[str]] | None = None

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return what ``batch.requested`` asks of the model, as plain tensors (collective).

        Raises
        ------
        SpecError
            When several layers exchanged nothing.
        PluginValidationError
            When a result is missing or doesn't fit what is declared.
        """
        context = current_dd_context()
        if context.rows.spec is not self.spec:  # a member, inside the evaluation of its composition
            rows = replace(context.rows, spec=self.spec)
            context = replace(context, scatter=self.spec.dispatch_rules.scatter, rows=rows)
        with enter_context(context):
            before = _exchanges(context)
            out = self.model.forward(self._wrapped(batch, context))
        if context.exchanges and self.model.layers > 1 and _exchanges(context) == before:
            raise SpecError(
                f"the model declares {self.model.layers} layers but exchanged nothing between them, so neighbours read "
                "stale ghost rows: call refresh_neighbors on what they read, or sum into a buffer made by "
                "batch.positions.new_zeros(batch.n_local, ...), or use the wide-halo strategy"
            )
        wanted, plan = batch.requested, context.plan
        found = results.results_of(out, wanted, self.spec)
        if plan is None:
            return found
        results.check_shapes(found, self.spec, plan, batch.n_systems)
        if self._checked is None or self._checked[0] is not plan or self._checked[1] != wanted:
            # once a rebuild: it costs a collective
            results.check_agreement(found, self.spec, plan.mesh)
            self._checked = (plan, wanted)
        return found

    def _wrapped(self, batch: LocalBatch, context: DomainContext) -> LocalBatch:
        """Return the batch with those rows as ShardTensors whose operations the spec lets follow by an exchange."""
        rows, rules = context.rows, self.spec.dispatch_rules
        scatters = context.exchanges and rules.scatter is not ScatterMode.LOCAL
        sums = scatters or (context.is_distributed and rules.system_reductions)
        if not sums:
            return batch
        wrap = functools.partial(
            ShardTensor.wrap,
            spec=self.spec,
            meta=rows.meta,
            config=rows.config,
            n_systems=batch.n_systems,
            kind=RowKind.LOCAL,
        )
        positions = wrap(batch.positions) if scatters else batch.positions
        return replace(batch, positions=positions, system=wrap(batch.system))


def _exchanges(context: DomainContext) -> int:
    return 0 if context.mesh is None else context.mesh.counter.calls["exchange"]
