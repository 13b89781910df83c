"""How the model runs on several ranks: one exchange of the descriptor each way, nothing else."""

from __future__ import annotations

from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import DistributionSpec, HaloStorage, ScatterMode, StrategyKind

SPEC_MPNN_EXAMPLE = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.REFRESH))
)
"""Receivers are owned rows, so after a sum over edges ghosts only need their owners' values."""


def mpnn_spec(strategy: StrategyKind) -> MLIPSpec:
    """Return the spec for a strategy."""
    if strategy is StrategyKind.WIDE_HALO:
        return SPEC_MPNN_WIDE
    return SPEC_MPNN_EXAMPLE | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
