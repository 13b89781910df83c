"""What a model declares about its distribution: data that merges, travels and is checked. Layer: spec."""

from nvdd_core.spec.adapter_kinds import AdapterData, register_adapter_kind
from nvdd_core.spec.base import VERSION, SpecData
from nvdd_core.spec.compile_policy import CompilePolicy
from nvdd_core.spec.distribution import DistributionSpec, StrategyKind
from nvdd_core.spec.frozen import FrozenMap
from nvdd_core.spec.outputs import OutputKind, OutputSpec, Reduce
from nvdd_core.spec.storage import GatherMode, HaloStorage, ReplicatedStorage, ShardedStorage, StoragePolicy
from nvdd_core.tensor import ScatterMode, StorageKind

__all__ = [
    "VERSION",
    "AdapterData",
    "CompilePolicy",
    "DistributionSpec",
    "FrozenMap",
    "GatherMode",
    "HaloStorage",
    "OutputKind",
    "OutputSpec",
    "Reduce",
    "ReplicatedStorage",
    "ScatterMode",
    "ShardedStorage",
    "SpecData",
    "StorageKind",
    "StoragePolicy",
    "StrategyKind",
    "register_adapter_kind",
]
