"""How MACE runs on several ranks.

Key objects: `SPEC_MACE_HALO`, `SPEC_MACE_GP`, `SPEC_MACE_WIDE`, `mace_spec`. A layer after the first costs one exchange
of features forward and one backward; the first reads elements and positions only. Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvdd_core.adapters import ModuleHookAdapter
from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import CompilePolicy, DistributionSpec, GatherMode, HaloStorage, ScatterMode, StrategyKind
from nvdd_mace.adapters import (
    FEATURES,
    MESSAGES,
    PADDED_PRODUCTS,
    PRODUCTS,
    READOUTS,
    REFRESH,
    SKIPS,
    of_layer,
)

# The hooks name all communication, so that none is added to mace's own scatters.
_LOCAL = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.REFRESH))
)


def _with(base: MLIPSpec, strategy: StrategyKind, adapters: Sequence[ModuleHookAdapter]) -> MLIPSpec:
    return base | MLIPSpec(
        distribution=DistributionSpec(strategy=strategy, third_party_helpers=tuple(adapters)),
        compile_policy=CompilePolicy(capture=True, pads=True),
    )


_OWNED = (MESSAGES, SKIPS, PRODUCTS, READOUTS)

SPEC_MACE_HALO = _with(_LOCAL, StrategyKind.HALO, (REFRESH, *_OWNED))
"""Several layers under HALO: one exchange a layer after the first, node-wise work on owned atoms."""

SPEC_MACE_GP = _with(_LOCAL, StrategyKind.GRAPH_PARTITION, (REFRESH, *_OWNED))
"""The same under GRAPH_PARTITION: atoms by index, every remote atom a ghost."""

SPEC_MACE_WIDE = _with(SPEC_MPNN_WIDE, StrategyKind.WIDE_HALO, (READOUTS,))
"""WIDE_HALO: ghosts within layers x cutoff are computed in full; nothing but positions is exchanged."""


def mace_spec(strategy: StrategyKind, layers: int = 2, *, after_linear_up: bool = True) -> MLIPSpec:
    """Return the spec of one model.

    Parameters
    ----------
    strategy : StrategyKind
    layers : int
    after_linear_up : bool
        Whether what ``linear_up`` makes is exchanged, or what it gets.
    """
    if strategy is StrategyKind.WIDE_HALO:
        # nobody reads ghosts of the last layer: that is all that a wide halo can spare
        last = [of_layer(adapter, layers - 1) for adapter in (MESSAGES, SKIPS, PADDED_PRODUCTS)]
        return _with(SPEC_MPNN_WIDE, strategy, (*last, READOUTS))
    refresh = [REFRESH if after_linear_up else FEATURES] if layers > 1 else []
    return _with(_LOCAL, strategy, (*refresh, *_OWNED))
