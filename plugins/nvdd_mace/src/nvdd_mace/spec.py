"""How MACE runs on several ranks.

Key objects: `SPEC_MACE_HALO`, `SPEC_MACE_GP`, `SPEC_MACE_WIDE`, `mace_spec`. A layer after the first costs one exchange
of features forward and one backward; the first reads elements and positions only. Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvdd_core.adapters import ModuleHookAdapter
from nvdd_core.runtime import SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import DistributionSpec, GatherMode, HaloStorage, ScatterMode, StrategyKind
from nvdd_mace.adapters import PRODUCTS, READOUTS, REFRESH, last_product, narrow_refresh, refresh_of

# The hooks name all communication, so that none is added to mace's own scatters.
_LOCAL = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.REFRESH))
)


def _with(base: MLIPSpec, strategy: StrategyKind, adapters: Sequence[ModuleHookAdapter]) -> MLIPSpec:
    return base | MLIPSpec(
        distribution=DistributionSpec(strategy=strategy, third_party_helpers=tuple(adapters))
    )


SPEC_MACE_HALO = _with(_LOCAL, StrategyKind.HALO, (REFRESH, PRODUCTS, READOUTS))
"""Several layers under HALO: one exchange a layer after the first, products and readouts on owned atoms."""

SPEC_MACE_GP = _with(_LOCAL, StrategyKind.GRAPH_PARTITION, (REFRESH, PRODUCTS, READOUTS))
"""The same under GRAPH_PARTITION: atoms by index, every remote atom a ghost."""

SPEC_MACE_WIDE = _with(SPEC_MPNN_WIDE, StrategyKind.WIDE_HALO, (READOUTS,))
"""WIDE_HALO: ghosts within layers x cutoff are computed in full; nothing but positions is exchanged."""


def mace_spec(strategy: StrategyKind, narrow: Sequence[bool] = (False, False)) -> MLIPSpec:
    """Return the spec of one model.

    Parameters
    ----------
    strategy : StrategyKind
    narrow : sequence of bool
        One a layer: whether its ``linear_up`` makes fewer numbers than it gets, so that these are exchanged instead.
        The first is ignored.
    """
    layers = len(narrow)
    if strategy is StrategyKind.WIDE_HALO:
        return _with(SPEC_MPNN_WIDE, strategy, (last_product(layers - 1), READOUTS))
    if layers == 1:
        return _with(_LOCAL, strategy, (PRODUCTS, READOUTS))
    if not any(narrow[1:]):
        return SPEC_MACE_HALO if strategy is StrategyKind.HALO else SPEC_MACE_GP
    refresh = [narrow_refresh(i) if narrow[i] else refresh_of(i) for i in range(1, layers)]
    return _with(_LOCAL, strategy, (*refresh, PRODUCTS, READOUTS))
