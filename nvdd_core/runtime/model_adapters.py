"""The adapters of one model: installed around its evaluations, and nowhere else.

Foreign code that a model runs is changed while an evaluation over several ranks is under way and is what it was
before at any other time, so the same classes serve other models, and this one in a single process, untouched.

Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nvdd_core.adapters import Adapter, AdapterRegistry, AdapterStatus, OpAdapter, intercept_plain_calls
from nvdd_core.comm import Mesh
from nvdd_core.errors import SpecError
from nvdd_core.plugins import default_manager
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.runtime.model_api import Model, members_of
from nvdd_core.tensor import RowScope


class ModelAdapters:
    """What a model's spec declares in ``custom_ops`` and ``third_party_helpers``, for one mesh.

    Parameters
    ----------
    model : Model
        Its ``module``, or itself where it is a `torch.nn.Module`, is where per-instance adapters look for submodules.
        Of a composition, each member's spec counts, and its adapters look into that member alone.
    spec : MLIPSpec
    mesh : Mesh
        On a mesh of one rank nothing is ever installed.

    Raises
    ------
    SpecError
        When an adapter has to reach into a module that is compiled already, and would be passed over in silence.
    """

    def __init__(self, model: Model, spec: MLIPSpec, mesh: Mesh) -> None:
        runs = [(f"{m.name}/", m.model, m.model.distribution_spec(spec.strategy)) for m in members_of(model)]
        self._several = mesh.size > 1
        self._registries: list[AdapterRegistry] = []
        self._ops = False
        for prefix, owned, its in runs or [("", model, spec)]:
            declared = (*its.distribution.custom_ops, *its.distribution.third_party_helpers)
            if declared:
                self._ops |= any(isinstance(adapter, OpAdapter) for adapter in declared)
                self._registries.append(self._registry(prefix, owned, declared))

    def _registry(self, prefix: str, model: Model, declared: Iterable[Any]) -> AdapterRegistry:
        """Return the adapters of one model, named with `prefix`."""
        owner, root = owner_of(model), root_module(model)
        if self._several and root is not None:
            _refuse_compiled(root)
        registry = AdapterRegistry((), owner=owner, root=root)
        for adapter in declared:
            named = isinstance(adapter, Adapter) and bool(prefix)
            name = f"{prefix}{adapter.describe().name}" if named else None
            registry.add(adapter, name=name, plugin=owner)  # which refuses what is no adapter
        return registry

    @contextmanager
    def installed(self, rows: RowScope) -> Iterator[None]:
        """Install the adapters for the body and restore them whatever happens.

        Ops are adapted for plain tensors, too, whose rows lie as `rows` says.
        """
        if not (self._several and self._registries):
            yield
            return
        with ExitStack() as stack:
            for registry in self._registries:
                stack.enter_context(registry)
            if self._ops:
                stack.enter_context(intercept_plain_calls(rows))
            yield

    def status(self) -> tuple[AdapterStatus, ...]:
        """Return the state of every adapter, with its plugin; of a composition, named ``member/adapter``."""
        return tuple(status for registry in self._registries for status in registry.status())


def root_module(model: object) -> torch.nn.Module | None:
    """Return the torch module inside a model: the model itself, or its attribute ``module``."""
    inner = model if isinstance(model, torch.nn.Module) else getattr(model, "module", None)
    return inner if isinstance(inner, torch.nn.Module) else None


def _refuse_compiled(root: torch.nn.Module) -> None:
    for name, module in root.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise SpecError(
                f"the model's module {name or type(module).__name__!r} is compiled (torch.compile), so the adapters of "
                "its spec would not take effect inside; hand nvdd the module as it was before"
            )


def owner_of(model: object) -> str:
    """Return the name of the plugin that a model's class belongs to, else the name of its package."""
    package = type(model).__module__.partition(".")[0]
    for record in default_manager().records(load_plugins=False):
        if record.entry.value.partition(":")[0].partition(".")[0] == package:
            return record.name
    return package
