"""The adapters of one model: installed around its evaluations, and nowhere else.

Foreign code that a model runs is changed while an evaluation over several ranks is under way and is what it was
before at any other time, so the same classes serve other models, and this one in a single process, untouched.

Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nvdd_core.adapters import AdapterRegistry, AdapterStatus, OpAdapter, intercept_plain_calls
from nvdd_core.comm import Mesh
from nvdd_core.errors import SpecError
from nvdd_core.plugins import default_manager
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.runtime.model_api import Model
from nvdd_core.tensor import ParticleHaloConfig, ParticleHaloMetadata, RowScope


class ModelAdapters:
    """What a model's spec declares in ``custom_ops`` and ``third_party_helpers``, for one mesh.

    Parameters
    ----------
    model : Model
        Its ``module``, or itself where it is a `torch.nn.Module`, is where per-instance adapters look for submodules.
    spec : MLIPSpec
    mesh : Mesh
        On a mesh of one rank nothing is ever installed.

    Raises
    ------
    SpecError
        When an adapter has to reach into a module that is compiled already, and would be passed over in silence.
    """

    def __init__(self, model: Model, spec: MLIPSpec, mesh: Mesh) -> None:
        declared = (*spec.distribution.custom_ops, *spec.distribution.third_party_helpers)
        owner = owner_of(model) if declared else ""
        self._active = bool(declared) and mesh.size > 1
        self._ops = any(isinstance(adapter, OpAdapter) for adapter in declared)
        self._spec = spec
        root = root_module(model)
        if self._active and root is not None:
            _refuse_compiled(root)
        self._registry = AdapterRegistry((), owner=owner, root=root)
        for adapter in declared:
            self._registry.add(adapter, plugin=owner)  # type: ignore[arg-type]  # checked there

    @contextmanager
    def installed(
        self, meta: ParticleHaloMetadata | None, config: ParticleHaloConfig, n_systems: int
    ) -> Iterator[None]:
        """Install the adapters for the body and restore them whatever happens.

        Ops are adapted for plain tensors, too, whose rows lie as `meta` says.
        """
        if not self._active:
            yield
            return
        with self._registry:
            if not self._ops:
                yield
                return
            with intercept_plain_calls(RowScope(meta, config, self._spec, n_systems)):
                yield

    def status(self) -> tuple[AdapterStatus, ...]:
        """Return the state of every adapter, with its plugin."""
        return self._registry.status()


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
