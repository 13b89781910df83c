"""How the Coulomb models run on several ranks.

Key objects: `SPEC_EWALD_HALO`, `SPEC_PME_HALO`, `coulomb_spec`. The real-space sum reads ghosts' positions and
charges, so nothing is exchanged after these. The reciprocal sum has no neighbours: its structure factors, or its mesh,
are summed over ranks inside the model and each rank keeps its share of the energy. Under `ReplicatedMesh` a mesh of
the whole cell is on every rank, under the sharded engine nothing of that size is. Layer: plugin.
"""

from __future__ import annotations

from nvdd_core.runtime import MLIPSpec
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

SPEC_EWALD_HALO = MLIPSpec(
    distribution=DistributionSpec(
        strategy=StrategyKind.HALO,
        storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.LOCAL),
    ),
    outputs={
        "energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "forces": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
        "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
        "node_energy": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
        "charge_gradient": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
    },
    compile_policy=CompilePolicy(capture=True),
)
"""The Ewald sum under HALO: energies of owned rows, structure factors summed over ranks."""

SPEC_PME_HALO = SPEC_EWALD_HALO
"""Particle-mesh Ewald under HALO: the same, with a mesh in place of the structure factors."""


def coulomb_spec(strategy: StrategyKind) -> MLIPSpec:
    """Return the spec for a strategy; only the choice of rows and ghosts differs."""
    return SPEC_EWALD_HALO | MLIPSpec(distribution=DistributionSpec(strategy=strategy))
