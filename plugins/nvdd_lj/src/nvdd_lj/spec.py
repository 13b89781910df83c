"""How Lennard-Jones runs on several ranks.

Key objects: `SPEC_LJ_HALO`, `lj_spec`. The kernel computes the complete force on every owned atom and this
rank's share of energy and virial itself, and reads ghosts' positions only; so nothing is exchanged after the
positions, under any strategy. Layer: plugin.
"""

from __future__ import annotations

from nvdd_core.runtime.mlip_spec import ForceStrategy, MLIPSpec
from nvdd_core.spec import (
    CompilePolicy,
    DistributionSpec,
    GatherMode,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ScatterMode,
    StrategyKind,
)

SPEC_LJ_HALO = MLIPSpec(
    distribution=DistributionSpec(
        strategy=StrategyKind.HALO,
        storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.LOCAL),
    ),
    outputs={
        "energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "forces": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
        "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "node_energy": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
        "node_virial": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
    },
    force_strategy=ForceStrategy.DIRECT,
    compile_policy=CompilePolicy(capture=True),
)
"""Lennard-Jones under HALO: forces by the kernel, complete on owned atoms; sums of energy and virial."""


def lj_spec(strategy: StrategyKind) -> MLIPSpec:
    """Return the spec for a strategy; only the choice of rows and ghosts differs.

    Parameters
    ----------
    strategy : StrategyKind
        Any.
    """
    return SPEC_LJ_HALO | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
