"""nvdd: one interatomic potential over many GPUs or CPU processes by domain decomposition.

The public names below are imported from their modules on first use (PEP 562), so that
``import nvdd_core`` stays light: it brings in neither torch nor any plugin.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Final

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
    "ShardTensor": "nvdd_core.tensor",
    # runtime
    "Batch": "nvdd_core.runtime",
    "DistributedManager": "nvdd_core.runtime",
    "DistributedModel": "nvdd_core.runtime",
    "DomainConfig": "nvdd_core.runtime",
    "ForceStrategy": "nvdd_core.runtime",
    "LocalBatch": "nvdd_core.runtime",
    "MLIPSpec": "nvdd_core.runtime",
    "Model": "nvdd_core.runtime",
    "Outputs": "nvdd_core.runtime",
    "SPEC_MPNN_GP": "nvdd_core.runtime",
    "SPEC_MPNN_HALO": "nvdd_core.runtime",
    "Scope": "nvdd_core.runtime",
    "ShardedBatch": "nvdd_core.runtime",
    "current_dd_context": "nvdd_core.runtime",
    "refresh_neighbors": "nvdd_core.runtime",
    "scatter_to_owners": "nvdd_core.runtime",
    "system_sum": "nvdd_core.runtime",
    "to_local": "nvdd_core.runtime",
    # dynamics
    "DomainParallel": "nvdd_core.dynamics",
    "HookScope": "nvdd_core.dynamics",
    "Langevin": "nvdd_core.dynamics",
    "VelocityVerlet": "nvdd_core.dynamics",
}

__all__ = ["__version__", *LAZY_NAMES]  # noqa: PLE0604 - every key is a str


def __getattr__(name: str) -> object:
    module = LAZY_NAMES.get(name)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value: object = resolve_name(f"{module}:{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY_NAMES})
