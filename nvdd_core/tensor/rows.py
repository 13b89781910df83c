"""`RowScope`: the distribution of the rows at hand, for code that sees plain tensors.

A ShardTensor carries its distribution with it, yet most operations on one give plain tensors. Whoever serves an
operation on plain rows is handed a scope instead.

Invariant: a scope holds what a ShardTensor of the same rows holds, so code written for one serves both.
Layer: tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvdd_core.comm import Mesh
from nvdd_core.tensor.lookup import GatherMetadata
from nvdd_core.tensor.meta import ParticleHaloConfig, ParticleHaloMetadata
from nvdd_core.tensor.modes import DEFAULT_RULES, DispatchRules, DispatchSpec
from nvdd_core.tensor.shard_tensor import ShardTensor


@dataclass(frozen=True, eq=False)
class RowScope:
    """One rank's part of a distribution of rows, and the rules for operations on them.

    Attributes
    ----------
    meta : ParticleHaloMetadata or None
        Sizes and routes of the halo.
    config : ParticleHaloConfig or None
        The mesh and the ghost width.
    spec : DispatchSpec or None
        Rules for the handlers; None keeps every operation local.
    n_systems : int or None
        Number of segments.
    gather_meta : GatherMetadata or None
        Owners by global id, for sharded storage.
    """

    meta: ParticleHaloMetadata | None = None
    config: ParticleHaloConfig | None = None
    spec: DispatchSpec | None = None
    n_systems: int | None = None
    gather_meta: GatherMetadata | None = None

    @classmethod
    def of(cls, x: ShardTensor) -> RowScope:
        """Return the scope of the rows that `x` belongs to."""
        return cls(x._meta, x._config, x._spec, x._n_systems, x._gather_meta)

    @property
    def rules(self) -> DispatchRules:
        """The rules of the spec, or the ones that keep everything local."""
        return DEFAULT_RULES if self.spec is None else self.spec.dispatch_rules

    @property
    def mesh(self) -> Mesh | None:
        """The mesh over which the rows are spread, None when nothing names one."""
        source = self.meta or self.gather_meta or self.config
        return None if source is None else source.mesh
