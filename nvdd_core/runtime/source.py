"""Where a model comes from, in a form that travels to other processes, each of which makes the model for itself.

Key object: `ModelSource`, for validations and for the conformance kit alike. Invariant: however a model is named,
its loader is called in one way. Layer: runtime.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
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
from nvdd_core.plugins.composition import Term, check_options, is_composition, read_model, shared_out
from nvdd_core.runtime.model_api import Model
from nvdd_core.runtime.pipeline import PipelineModel


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, so that other processes can make it as well.

    Parameters
    ----------
    target : str, callable or Model
        Name of an installed model, ``"package.module:loader"``, ``"path/file.py:loader"`` (whose folder is put on the
        search path), several of the first two as ``"one+0.5*other"``, a loader, or a model itself. A loader is called
        with ``dtype`` and ``device``, as far as it takes them, and with the options.
    options : mapping
        The loader's options; of several models, ``"one.option"`` is for one of them.
    """

    target: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any] | None = None) -> ModelSource:
        """Return `model` as a source, itself if it is one."""
        return model if isinstance(model, ModelSource) else cls(model, dict(options or {}))

    @property
    def name(self) -> str:
        """What to call the model."""
        if isinstance(self.target, str):
            return self.target
        kind = self.target if hasattr(self.target, "__qualname__") else type(self.target)
        return f"{kind.__module__}:{kind.__qualname__}"

    def by_name(self) -> ModelSource:
        """Return the same with a loader's name in place of the loader.

        Raises
        ------
        InputError
            When other processes could not find it by name.
        """
        if isinstance(self.target, str):
            return self
        if not callable(self.target):
            raise InputError(
                f"model is {self.target!r}: expected a model's name or a function that makes one"
            )
        module, name = getattr(self.target, "__module__", ""), getattr(self.target, "__qualname__", "")
        if not module or not name or "<" in name or module == "__main__":
            raise InputError(
                f"{self.target!r} can't be found by name in worker processes; put it at the top level of a module, or "
                "name it as 'path/file.py:factory'"
            )
        return ModelSource(f"{module}:{name}", self.options)

    def parts(self) -> tuple[tuple[Term, ModelSource], ...]:
        """Return each member of a composition with its own options, and of any other model itself.

        Raises
        ------
        InputError
            When there is no such model, or an option is nobody's or could be for several members.
        """
        if not isinstance(self.target, str) or not is_composition(self.target):
            return ((Term(self.name, self.name), self),)
        terms = read_model(self.target)
        loaders = {term.name: ModelSource(term.model).loader() for term in terms}
        options = shared_out(terms, self.options, loaders)
        return tuple((term, ModelSource(term.model, options[term.name])) for term in terms)

    def load(self, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu") -> Model:
        """Make the model in this process; a model given as such is returned as it is.

        Raises
        ------
        InputError
            When there is no such model, or it takes no such options.
        """
        if hasattr(self.target, "forward") and not isinstance(self.target, type):
            return cast(Model, self.target)
        parts = self.parts()
        for term, part in parts:  # before any of them takes its time
            check_options(term.model, part.options, part.loader())
        if parts[0][1] is not self:
            return PipelineModel(
                {term.name: part.load(dtype, device) for term, part in parts},
                weights={term.name: term.weight for term, _ in parts},
            )
        loader = self.loader()
        given: dict[str, Any] = {"dtype": dtype, "device": torch.device(device)}
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
            raise InputError(f"model '{self.name}': {exc}") from exc
        return cast(Model, loader(**given, **self.options))

    def loader(self) -> Callable[..., object]:
        """Return the loader of a model that is no composition.

        Raises
        ------
        InputError
            When there is none.
        """
        if not isinstance(self.target, str):
            found = self.target
        elif ":" not in self.target:
            return default_manager().loader(self.target)
        else:
            where, _, attribute = self.target.rpartition(":")
            try:
                module = _module_of_file(where).__name__ if where.endswith(".py") else where
                found = resolve_name(f"{module}:{attribute}")
            except InputError:
                raise
            except (ImportError, AttributeError, ValueError) as exc:
                raise InputError(f"model '{self.name}': {type(exc).__name__}: {exc}") from exc
        if not callable(found):
            raise InputError(f"model '{self.name}' is no factory but {found!r}")
        return cast(Callable[..., object], found)

    def key(self) -> bytes:
        """Return bytes that are equal for equal sources."""
        return pickle.dumps((self.target, dict(self.options)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.target, dict(self.options), os.getcwd())


def _arrived(target: Any, options: Mapping[str, Any], folder: str) -> ModelSource:
    """Make a source anew elsewhere, and import its file: what comes after it may be of classes defined there."""
    where, _, attribute = target.rpartition(":") if isinstance(target, str) else ("", "", "")
    if where.endswith(".py"):
        path = os.path.join(folder, where)
        if os.path.isfile(path):  # else `load` says so
            _module_of_file(path)
        target = f"{path}:{attribute}"
    return ModelSource(target, options)


def _module_of_file(path: str) -> ModuleType:
    """Import a file as a module of its own, once a process, with its folder on the search path."""
    file = Path(path).resolve()
    name = f"nvdd_model_{file.stem}_{zlib.crc32(str(file).encode()):x}"  # the same in every process
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise InputError(f"model file {path}: no such file")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"model file {path}: can't be imported")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # where ``python file.py`` would have it
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
