"""How TOY2 runs on several ranks.

Every edge belongs to the rank that owns its receiver, so sums over edges into owned rows are complete, and after a sum
the ghosts need their owners' values and nothing else: that is the scatter mode ``refresh``.
"""

from __future__ import annotations

from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind

SPEC_TOY2_HALO = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.REFRESH))
)
"""For the ways that leave exchanges to ShardTensor."""

SPEC_TOY2_VERBS = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL))
)
"""For the way that calls ``refresh_neighbors`` itself."""


def toy2_spec(strategy: StrategyKind, style: str) -> MLIPSpec:
    """Return the spec for a strategy and a way of writing the model."""
    if strategy is StrategyKind.WIDE_HALO:
        return SPEC_MPNN_WIDE
    base = SPEC_TOY2_VERBS if style == "verbs" else SPEC_TOY2_HALO
    return base | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
