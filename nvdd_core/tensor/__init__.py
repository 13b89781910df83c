"""Tensors of rows spread over ranks, and the dispatch of operations on them. Layer: tensor."""

from nvdd_core.tensor import handlers
from nvdd_core.tensor.exchanges import collect_exchanges
from nvdd_core.tensor.files import safe_globals
from nvdd_core.tensor.lookup import GatherMetadata, RowLookup
from nvdd_core.tensor.meta import ParticleHaloConfig, ParticleHaloMetadata, loading_onto
from nvdd_core.tensor.modes import DispatchRules, DispatchSpec, RowKind, ScatterMode, StorageKind
from nvdd_core.tensor.registry import REGISTRY, Handler, HandlerRegistry, Registration
from nvdd_core.tensor.rows import RowScope
from nvdd_core.tensor.shard_tensor import ShardTensor
from nvdd_core.tensor.trace import DispatchRecord, DispatchTrace
from nvdd_core.tensor.versions import version_of

__all__ = [
    "REGISTRY",
    "DispatchRecord",
    "DispatchRules",
    "DispatchSpec",
    "DispatchTrace",
    "GatherMetadata",
    "Handler",
    "HandlerRegistry",
    "ParticleHaloConfig",
    "ParticleHaloMetadata",
    "Registration",
    "RowKind",
    "RowLookup",
    "RowScope",
    "ScatterMode",
    "ShardTensor",
    "StorageKind",
    "collect_exchanges",
    "loading_onto",
    "safe_globals",
    "version_of",
]

handlers.install(REGISTRY)
