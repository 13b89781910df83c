"""`DistributionSpec`: how a model's rows are spread and what its operations need, without a word on what rows are.

Layer: spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from nvdd_core.errors import SpecError
from nvdd_core.spec.adapter_kinds import AdapterData, decode_adapter, is_adapter
from nvdd_core.spec.base import Decode, SpecData, decode_enum, decode_tuple, decode_value, decode_variant
from nvdd_core.spec.storage import HaloStorage, ReplicatedStorage, ShardedStorage, StoragePolicy
from nvdd_core.tensor import DispatchRules, ScatterMode, StorageKind

_POLICIES = (HaloStorage, ShardedStorage, ReplicatedStorage)
_HALO = HaloStorage()


class StrategyKind(StrEnum):
    """Partition rule and ghost rule of a run."""

    HALO = "halo"
    """Rows by place; ghosts within one cutoff; an exchange between layers."""
    GRAPH_PARTITION = "graph_partition"
    """Rows by index; every remote row is a ghost; an exchange between layers."""
    WIDE_HALO = "wide_halo"
    """Rows by place; ghosts within one cutoff a layer; no exchange between layers."""


@dataclass(frozen=True)
class DistributionSpec(SpecData):
    """What a model needs of the distribution under one strategy.

    Attributes
    ----------
    strategy : StrategyKind
    storage : HaloStorage, ShardedStorage or ReplicatedStorage
    system_reductions : bool
        Whether sums of rows by segment inside the model run over all ranks. False leaves each rank its own
        share, which is what is differentiated.
    custom_ops : tuple of adapters
        For kernels that the dispatch can't see into.
    third_party_helpers : tuple of adapters
        For functions and methods of foreign code.

    Raises
    ------
    SpecError
        When a field has the wrong type or two fields contradict each other.
    """

    READERS: ClassVar[Mapping[str, Decode]] = {
        "strategy": decode_enum(StrategyKind),
        "storage": decode_variant(*_POLICIES),
        "system_reductions": decode_value(bool),
        "custom_ops": decode_tuple(decode_adapter),
        "third_party_helpers": decode_tuple(decode_adapter),
    }

    strategy: StrategyKind = StrategyKind.HALO
    storage: StoragePolicy = _HALO
    system_reductions: bool = False
    custom_ops: tuple[AdapterData, ...] = ()
    third_party_helpers: tuple[AdapterData, ...] = ()

    def __post_init__(self) -> None:
        self._set_enum("strategy", StrategyKind)
        self._require("storage", _POLICIES)
        self._require("system_reductions", bool)
        self._set_adapters("custom_ops")
        self._set_adapters("third_party_helpers")
        corrects = (
            isinstance(self.storage, HaloStorage) and self.storage.scatter is ScatterMode.HALO_CORRECTION
        )
        if self.strategy is StrategyKind.WIDE_HALO and corrects:
            raise SpecError(
                "DistributionSpec: under wide_halo ghosts' values are computed in full, so halo_correction would "
                "count them twice; use the scatter mode 'local'"
            )

    def _set_adapters(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (tuple, list)) or not all(is_adapter(item) for item in value):
            raise SpecError(f"DistributionSpec.{name}: expected a tuple of adapters, found {value!r}")
        object.__setattr__(self, name, tuple(value))

    @property
    def dispatch_rules(self) -> DispatchRules:
        """The rules for ShardTensor's handlers."""
        scatter = self.storage.scatter if isinstance(self.storage, HaloStorage) else ScatterMode.LOCAL
        exchanges = self.strategy is not StrategyKind.WIDE_HALO
        return DispatchRules(StorageKind(self.storage.VARIANT), scatter, self.system_reductions, exchanges)
