"""Where a model comes from, in a form that travels to workers: a name that each process looks up for itself.

Layer: validate.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, cast

import torch

from nvdd_core.errors import InputError
from nvdd_core.plugins import default_manager
from nvdd_core.runtime import Model


@dataclass(frozen=True)
class ModelSource:
    """A model by name.

    Attributes
    ----------
    name : str
        Of an installed model, or ``"package.module:factory"`` or ``"path/file.py:factory"``.
    options : mapping
        Further arguments of the loader or factory.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: str | Callable[..., Model], options: Mapping[str, Any] | None = None) -> ModelSource:
        """Return the source of a name or of a callable that can be imported.

        Raises
        ------
        InputError
            When workers could not find the callable by name.
        """
        if isinstance(model, str):
            return cls(model, dict(options or {}))
        module, name = getattr(model, "__module__", ""), getattr(model, "__qualname__", "")
        if not module or not name or "<" in name or module == "__main__":
            raise InputError(
                f"{model!r} can't be found by name in worker processes; put it at the top level of a module, or name "
                "it as 'path/file.py:factory'"
            )
        return cls(f"{module}:{name}", dict(options or {}))

    def load(self, dtype: torch.dtype, device: torch.device) -> Model:
        """Make the model in this process.

        Raises
        ------
        InputError
            When there is no such model, or it takes no such options.
        """
        loader = self._loader()
        given = {"dtype": dtype, "device": device}
        try:
            signature = inspect.signature(loader)
        except (TypeError, ValueError):  # a loader without a readable signature takes what loaders take
            return cast(Model, loader(**given, **self.options))
        parameters = signature.parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        try:
            signature.bind(**given, **self.options)
        except TypeError as exc:
            known = ", ".join(name for name in parameters if name not in ("dtype", "device")) or "none"
            raise InputError(f"model '{self.name}': {exc}; its options: {known}") from exc
        return cast(Model, loader(**given, **self.options))

    def _loader(self) -> Callable[..., object]:
        if ":" not in self.name:
            return default_manager().loader(self.name)
        where, _, attribute = self.name.rpartition(":")
        try:
            module = _module_of_file(where).__name__ if where.endswith(".py") else where
            found = resolve_name(f"{module}:{attribute}")
        except (ImportError, AttributeError, ValueError) as exc:
            raise InputError(f"model '{self.name}': {type(exc).__name__}: {exc}") from exc
        if not callable(found):
            raise InputError(f"model '{self.name}': {attribute} is no factory but {found!r}")
        return cast(Callable[..., object], found)


def _module_of_file(path: str) -> ModuleType:
    """Import a file as a module of its own, once a process."""
    file = Path(path).resolve()
    name = f"nvdd_validated_{file.stem}_{zlib.crc32(str(file).encode()):x}"  # the same in every process
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise InputError(f"model file {path}: no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"model file {path}: can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
