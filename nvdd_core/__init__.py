"""nvdd: one interatomic potential over many GPUs or CPU processes by domain decomposition.

The public names below are imported from their modules on first use (PEP 562), so that
``import nvdd_core`` stays light: it brings in neither torch nor any plugin.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

# Public name -> the module that defines it.
LAZY_NAMES: Final = {
    # plugins: what they declare, and how they are found
    "AdapterDecl": "nvdd_core.plugins",
    "ModelDecl": "nvdd_core.plugins",
    "PluginInfo": "nvdd_core.plugins",
    "PluginManager": "nvdd_core.plugins",
    "Ref": "nvdd_core.plugins",
    "SpecDecl": "nvdd_core.plugins",
    "default_manager": "nvdd_core.plugins",
    "hookimpl": "nvdd_core.plugins",
    # errors
    "InputError": "nvdd_core.errors",
    "NvddError": "nvdd_core.errors",
    # comm
    "HaloPlan": "nvdd_core.comm",
    "Mesh": "nvdd_core.comm",
    # spec
    "CompilePolicy": "nvdd_core.spec",
    "DistributionSpec": "nvdd_core.spec",
    "OutputKind": "nvdd_core.spec",
    "OutputSpec": "nvdd_core.spec",
    "Reduce": "nvdd_core.spec",
    "StrategyKind": "nvdd_core.spec",
    # tensor
    "DispatchTrace": "nvdd_core.tensor",
    "ShardTensor": "nvdd_core.tensor",
    # adapters
    "AdapterRegistry": "nvdd_core.adapters",
    "AdapterStatus": "nvdd_core.adapters",
    "FunctionAdapter": "nvdd_core.adapters",
    "JitAdapter": "nvdd_core.adapters",
    "MethodAdapter": "nvdd_core.adapters",
    "ModuleHookAdapter": "nvdd_core.adapters",
    "OpAdapter": "nvdd_core.adapters",
    "PythonAdapter": "nvdd_core.adapters",
    # runtime
    "Batch": "nvdd_core.runtime",
    "DistributedManager": "nvdd_core.runtime",
    "DistributedModel": "nvdd_core.runtime",
    "DomainConfig": "nvdd_core.runtime",
    "DistributedPipelineModel": "nvdd_core.runtime",
    "ForceStrategy": "nvdd_core.runtime",
    "LocalBatch": "nvdd_core.runtime",
    "MLIPSpec": "nvdd_core.runtime",
    "Model": "nvdd_core.runtime",
    "Outputs": "nvdd_core.runtime",
    "PipelineModel": "nvdd_core.runtime",
    "SPEC_MPNN_GP": "nvdd_core.runtime",
    "SPEC_MPNN_HALO": "nvdd_core.runtime",
    "SPEC_MPNN_WIDE": "nvdd_core.runtime",
    "Scope": "nvdd_core.runtime",
    "ShardedBatch": "nvdd_core.runtime",
    "WorkerPool": "nvdd_core.runtime",
    "autograd_target": "nvdd_core.runtime",
    "current_dd_context": "nvdd_core.runtime",
    "distributed_method": "nvdd_core.runtime",
    "localize": "nvdd_core.runtime",
    "neighbor_refresh_adapters": "nvdd_core.runtime",
    "refresh_neighbors": "nvdd_core.runtime",
    "scatter_to_owners": "nvdd_core.runtime",
    "system_sum": "nvdd_core.runtime",
    "to_local": "nvdd_core.runtime",
    # dynamics
    "DomainParallel": "nvdd_core.dynamics",
    "HookScope": "nvdd_core.dynamics",
    "Langevin": "nvdd_core.dynamics",
    "VelocityVerlet": "nvdd_core.dynamics",
    # interop
    "DomainCalculator": "nvdd_core.interop",
    # validate
    "ValidationReport": "nvdd_core.validate",
    "trace_and_validate": "nvdd_core.validate",
}

__all__ = ["__version__", *LAZY_NAMES]  # noqa: PLE0604 - every key is a str


# The same names for type checkers, to which __getattr__ tells nothing; a test compares the two lists.
if TYPE_CHECKING:
    from nvdd_core.adapters import (
        AdapterRegistry as AdapterRegistry,
        AdapterStatus as AdapterStatus,
        FunctionAdapter as FunctionAdapter,
        JitAdapter as JitAdapter,
        MethodAdapter as MethodAdapter,
        ModuleHookAdapter as ModuleHookAdapter,
        OpAdapter as OpAdapter,
        PythonAdapter as PythonAdapter,
    )
    from nvdd_core.comm import HaloPlan as HaloPlan, Mesh as Mesh
    from nvdd_core.dynamics import (
        DomainParallel as DomainParallel,
        HookScope as HookScope,
        Langevin as Langevin,
        VelocityVerlet as VelocityVerlet,
    )
    from nvdd_core.errors import InputError as InputError, NvddError as NvddError
    from nvdd_core.interop import DomainCalculator as DomainCalculator
    from nvdd_core.plugins import (
        AdapterDecl as AdapterDecl,
        ModelDecl as ModelDecl,
        PluginInfo as PluginInfo,
        PluginManager as PluginManager,
        Ref as Ref,
        SpecDecl as SpecDecl,
        default_manager as default_manager,
        hookimpl as hookimpl,
    )
    from nvdd_core.runtime import (
        SPEC_MPNN_GP as SPEC_MPNN_GP,
        SPEC_MPNN_HALO as SPEC_MPNN_HALO,
        SPEC_MPNN_WIDE as SPEC_MPNN_WIDE,
        Batch as Batch,
        DistributedManager as DistributedManager,
        DistributedModel as DistributedModel,
        DistributedPipelineModel as DistributedPipelineModel,
        DomainConfig as DomainConfig,
        ForceStrategy as ForceStrategy,
        LocalBatch as LocalBatch,
        MLIPSpec as MLIPSpec,
        Model as Model,
        Outputs as Outputs,
        PipelineModel as PipelineModel,
        Scope as Scope,
        ShardedBatch as ShardedBatch,
        WorkerPool as WorkerPool,
        autograd_target as autograd_target,
        current_dd_context as current_dd_context,
        distributed_method as distributed_method,
        localize as localize,
        neighbor_refresh_adapters as neighbor_refresh_adapters,
        refresh_neighbors as refresh_neighbors,
        scatter_to_owners as scatter_to_owners,
        system_sum as system_sum,
        to_local as to_local,
    )
    from nvdd_core.spec import (
        CompilePolicy as CompilePolicy,
        DistributionSpec as DistributionSpec,
        OutputKind as OutputKind,
        OutputSpec as OutputSpec,
        Reduce as Reduce,
        StrategyKind as StrategyKind,
    )
    from nvdd_core.tensor import DispatchTrace as DispatchTrace, ShardTensor as ShardTensor
    from nvdd_core.validate import (
        ValidationReport as ValidationReport,
        trace_and_validate as trace_and_validate,
    )


def __getattr__(name: str) -> object:
    module = LAZY_NAMES.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value: object = resolve_name(f"{module}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_NAMES})
