"""`MLIPSpec`: everything a potential declares for distributed runs, and the presets for message passing.

A model returns one from ``distribution_spec(strategy)``. It holds the distribution proper, what each output is and
how the ranks' values combine, who computes forces, and how the forward pass may be compiled. Specs merge with
``|``, so a model starts from a preset and names only what differs.

Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from nvdd_core.errors import SpecError
from nvdd_core.spec import (
    CompilePolicy,
    DistributionSpec,
    FrozenMap,
    GatherMode,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ScatterMode,
    SpecData,
    StrategyKind,
)
from nvdd_core.spec.base import Decode, decode_enum, decode_map, decode_spec
from nvdd_core.tensor import DispatchRules


class ForceStrategy(StrEnum):
    """Who computes forces."""

    AUTOGRAD = "autograd"
    """The framework, as the gradient of this rank's partial energy."""
    DIRECT = "direct"
    """The model, for owned atoms, together with its rank's partial virial."""
    MIXED = "mixed"
    """Both: to the gradient is added what the model gives itself, of energies without a graph (a composition)."""


UNDECLARED = OutputSpec()
"""What holds for an output that a spec doesn't name."""

_PER_ROW = frozenset({"forces", "node_energy", "node_virial"})
_DISTRIBUTION = DistributionSpec()
_NO_OUTPUTS: FrozenMap[OutputSpec] = FrozenMap()
_COMPILE_POLICY = CompilePolicy()


@dataclass(frozen=True)
class MLIPSpec(SpecData):
    """What a potential declares under one strategy.

    Attributes
    ----------
    distribution : DistributionSpec
    outputs : mapping of str to OutputSpec
        By name: ``energy``, ``forces``, ``stress``, ``node_energy``, ...
    force_strategy : ForceStrategy
    compile_policy : CompilePolicy

    Raises
    ------
    SpecError
        When a field has the wrong type.
    """

    READERS: ClassVar[Mapping[str, Decode]] = {
        "distribution": decode_spec(DistributionSpec),
        "outputs": decode_map(decode_spec(OutputSpec)),
        "force_strategy": decode_enum(ForceStrategy),
        "compile_policy": decode_spec(CompilePolicy),
    }

    distribution: DistributionSpec = _DISTRIBUTION
    outputs: Mapping[str, OutputSpec] = _NO_OUTPUTS
    force_strategy: ForceStrategy = ForceStrategy.AUTOGRAD
    compile_policy: CompilePolicy = _COMPILE_POLICY

    def __post_init__(self) -> None:
        self._require("distribution", DistributionSpec)
        self._require("outputs", Mapping)
        self._set_enum("force_strategy", ForceStrategy)
        self._require("compile_policy", CompilePolicy)
        for name, output in self.outputs.items():
            if not isinstance(name, str) or not isinstance(output, OutputSpec):
                raise SpecError(f"MLIPSpec.outputs[{name!r}]: expected an OutputSpec, found {output!r}")
        object.__setattr__(self, "outputs", FrozenMap(self.outputs))

    @property
    def strategy(self) -> StrategyKind:
        """The strategy that this spec is for."""
        return self.distribution.strategy

    @property
    def dispatch_rules(self) -> DispatchRules:
        """The rules for ShardTensor's handlers."""
        return self.distribution.dispatch_rules

    def output(self, name: str) -> OutputSpec:
        """Return what is declared for an output, `UNDECLARED` when nothing is."""
        return self.outputs.get(name, UNDECLARED)

    def per_row(self, name: str) -> bool:
        """Return whether dim 0 of an output counts rows: by definition, or since it is declared so."""
        return name in _PER_ROW or self.output(name).kind is OutputKind.PER_NODE


_OUTPUTS = {
    "energy": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    "forces": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
    "stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE),
    "node_energy": OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY),
}

SPEC_MPNN_HALO = MLIPSpec(
    distribution=DistributionSpec(
        strategy=StrategyKind.HALO,
        storage=HaloStorage(scatter=ScatterMode.HALO_CORRECTION, gather=GatherMode.REFRESH),
    ),
    outputs=_OUTPUTS,
)
"""Message passing in plain torch under HALO: right for scatters into owned and into ghost atoms.

A model that scatters to receivers only, as the framework's edges suggest, halves the traffic with
``HaloStorage(scatter=ScatterMode.REFRESH)``; one that refreshes its features itself uses ``ScatterMode.LOCAL``.
"""

SPEC_MPNN_GP = SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(strategy=StrategyKind.GRAPH_PARTITION))
"""Message passing under GRAPH_PARTITION: atoms by index, every remote atom a ghost."""

SPEC_MPNN_WIDE = MLIPSpec(
    distribution=DistributionSpec(
        strategy=StrategyKind.WIDE_HALO,
        storage=HaloStorage(scatter=ScatterMode.LOCAL, gather=GatherMode.LOCAL),
    ),
    outputs=_OUTPUTS,
)
"""Message passing under WIDE_HALO: ghosts within layers x cutoff are computed in full, nothing is exchanged."""
