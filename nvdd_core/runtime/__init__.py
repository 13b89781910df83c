"""Atoms, models and their evaluation over ranks. Layer: runtime."""

from nvdd_core.runtime.batch import Batch, LocalBatch
from nvdd_core.runtime.config import DomainConfig
from nvdd_core.runtime.context import (
    DomainContext,
    Scope,
    autograd_target,
    current_dd_context,
    distributed_method,
    localize,
    refresh_neighbors,
    scatter_to_owners,
    system_sum,
    to_local,
)
from nvdd_core.runtime.distributed_model import DistributedModel
from nvdd_core.runtime.manager import (
    DistributedManager,
    resolve_device,
    resolve_local_rank,
    resolve_rank,
    resolve_world_size,
)
from nvdd_core.runtime.mlip_spec import (
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_MPNN_WIDE,
    ForceStrategy,
    MLIPSpec,
)
from nvdd_core.runtime.model_api import Model
from nvdd_core.runtime.outputs import OUTPUTS, Outputs
from nvdd_core.runtime.pipeline import DistributedPipelineModel, PipelineModel
from nvdd_core.runtime.refresh import neighbor_refresh_adapters
from nvdd_core.runtime.sharded import ShardedBatch
from nvdd_core.runtime.timer import PHASES, PhaseTimer
from nvdd_core.runtime.workers import WorkerPool

__all__ = [
    "OUTPUTS",
    "PHASES",
    "SPEC_MPNN_GP",
    "SPEC_MPNN_HALO",
    "SPEC_MPNN_WIDE",
    "Batch",
    "DistributedManager",
    "DistributedModel",
    "DistributedPipelineModel",
    "DomainConfig",
    "DomainContext",
    "ForceStrategy",
    "LocalBatch",
    "MLIPSpec",
    "Model",
    "Outputs",
    "PhaseTimer",
    "PipelineModel",
    "Scope",
    "ShardedBatch",
    "WorkerPool",
    "autograd_target",
    "current_dd_context",
    "distributed_method",
    "localize",
    "neighbor_refresh_adapters",
    "refresh_neighbors",
    "resolve_device",
    "resolve_local_rank",
    "resolve_rank",
    "resolve_world_size",
    "scatter_to_owners",
    "system_sum",
    "to_local",
]
