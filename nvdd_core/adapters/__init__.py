"""Reversible changes to foreign code, so that it works on rows that are spread over ranks. Layer: adapters."""

from nvdd_core.adapters.attributes import FunctionAdapter, MethodAdapter, PythonAdapter
from nvdd_core.adapters.base import Adapter, AdapterState, AdapterStatus, Patch
from nvdd_core.adapters.jit import JitAdapter, JitMode
from nvdd_core.adapters.modules import ModuleHookAdapter
from nvdd_core.adapters.op import OpAdapter
from nvdd_core.adapters.op_patch import intercept_plain_calls
from nvdd_core.adapters.registry import AdapterRegistry
from nvdd_core.adapters.transforms import (
    AllReduceSum,
    ArgTransform,
    GatherInputs,
    GatherInputsFull,
    OutputTransform,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
)
from nvdd_core.errors import AdapterConflictError, AdapterError
from nvdd_core.spec import register_adapter_kind

__all__ = [
    "Adapter",
    "AdapterConflictError",
    "AdapterError",
    "AdapterRegistry",
    "AdapterState",
    "AdapterStatus",
    "AllReduceSum",
    "ArgTransform",
    "FunctionAdapter",
    "GatherInputs",
    "GatherInputsFull",
    "JitAdapter",
    "JitMode",
    "MethodAdapter",
    "ModuleHookAdapter",
    "OpAdapter",
    "OutputTransform",
    "Patch",
    "PythonAdapter",
    "ScatterOutputs",
    "SliceOutputsOwned",
    "SliceOwned",
    "intercept_plain_calls",
]

for _adapter in (OpAdapter, MethodAdapter, FunctionAdapter, PythonAdapter, JitAdapter, ModuleHookAdapter):
    register_adapter_kind(_adapter.kind, _adapter.from_dict)
