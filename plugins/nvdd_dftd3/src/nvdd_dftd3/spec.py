"""How DFT-D3 runs on several ranks.

Key objects: `SPEC_DFTD3_HALO`, `dftd3_spec`. The model has two layers: coordination numbers of owned rows from
their edges, then pair energies, which read the coordination numbers of neighbours. The model asks for the one
exchange between them itself, so nothing is added to its sums. Layer: plugin.
"""

from __future__ import annotations

from nvdd_core.runtime import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.spec import CompilePolicy, DistributionSpec, GatherMode, HaloStorage, ScatterMode, StrategyKind

SPEC_DFTD3_HALO = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(
        strategy=StrategyKind.HALO,
        storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.LOCAL),
    ),
    compile_policy=CompilePolicy(capture=True),
)
"""DFT-D3 under HALO: one exchange of coordination numbers forward, one reverse; forces by the framework."""


def dftd3_spec(strategy: StrategyKind) -> MLIPSpec:
    """Return the spec for a strategy; only the choice of rows and ghosts differs.

    Parameters
    ----------
    strategy : StrategyKind
        Any. Under WIDE_HALO coordination numbers of ghosts are computed, not exchanged.
    """
    return SPEC_DFTD3_HALO | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
