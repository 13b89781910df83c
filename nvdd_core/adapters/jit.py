"""`JitAdapter`: what to do about TorchScript, which ShardTensor's handlers can't see into.

``marshal`` runs the scripted callable on plain tensors and wraps its row outputs again. ``eager`` runs its Python
original instead, so that handlers see each operation.

Layer: adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import torch

from nvdd_core.adapters.attributes import checked_code, everywhere, site_of
from nvdd_core.adapters.base import Adapter, Name, Patch
from nvdd_core.adapters.places import AttributePatch, home_of, wrapped_entry, wrapper
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.plugins.rows import AdapterKind
from nvdd_core.tensor import ShardTensor

Replacement = Callable[..., Any]
"""(original, *args, **kwargs) -> result."""


class JitMode(StrEnum):
    """How a scripted callable is served."""

    MARSHAL = "marshal"
    EAGER = "eager"


@dataclass(frozen=True)
class JitAdapter(Adapter):
    """Makes a scripted function or method work on ShardTensors.

    Attributes
    ----------
    target : ScriptFunction or str
        ``"package.module:function"``, ``"package.module:Class.method"`` for a method of a ScriptModule class, or
        ``"package.module:Class.attribute"`` for a scripted function held by a class.
    mode : JitMode or str
        ``"marshal"`` or ``"eager"``.
    original : callable or str, optional
        The Python original for ``eager``; left out, it is the one that torch remembers.
    row_outputs : tuple of int
        Outputs that ``marshal`` wraps like the first ShardTensor among the arguments; ``()`` for none.
    install_site : str
        Where this was written.

    Raises
    ------
    SpecError
        When an argument is malformed.
    """

    kind: ClassVar[str] = AdapterKind.JIT.value

    target: Any
    mode: JitMode | str = JitMode.MARSHAL
    original: Callable[..., Any] | str | None = field(default=None, kw_only=True)
    row_outputs: tuple[int, ...] = field(default=(0,), kw_only=True)
    install_site: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in list(JitMode):
            raise SpecError(f"JitAdapter.mode: expected 'marshal' or 'eager', found {self.mode!r}")
        outputs = tuple(self.row_outputs)
        if not all(type(p) is int and p >= 0 for p in outputs):
            raise SpecError(
                f"JitAdapter.row_outputs: expected positions, counted from 0, found {self.row_outputs!r}"
            )
        target = self.target
        if isinstance(target, torch.jit.ScriptFunction):  # its own name says nothing
            target = home_of(target) or target
        object.__setattr__(self, "target", checked_code(target, "JitAdapter.target"))
        object.__setattr__(self, "mode", JitMode(self.mode))
        object.__setattr__(self, "row_outputs", outputs)
        if self.original is not None:
            object.__setattr__(self, "original", checked_code(self.original, "JitAdapter.original"))
        object.__setattr__(self, "install_site", site_of(self.install_site, self.original))

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return str(self.target)

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        what = str(self)
        owner, _, name = self.target.rpartition(".")
        if self.target.live is not None or ":" not in owner:  # a function of a module
            return everywhere(
                self.target, what, lambda found, on: wrapper(found, self._for_function(found), on)
            )
        cls = Name(owner).resolve(what)
        stub = getattr(cls, "_methods", {}).get(name)  # script_method, which torch takes out of the class
        if stub is None:
            return AttributePatch(
                cls, name, what, lambda raw, on: wrapped_entry(what, raw, self._for_function(_inner(raw)), on)
            )
        replacement = self._replacement(stub.original_method)
        return AttributePatch(cls, name, what, lambda raw, on: wrapper(_script_method(name), replacement, on))

    def _for_function(self, found: Any) -> Replacement:
        if not isinstance(found, torch.jit.ScriptFunction):
            raise AdapterError(
                f"{self}: a scripted function is expected, found {found!r}; use FunctionAdapter"
            )
        return self._replacement(getattr(found, "_torchdynamo_inline", None))

    def _replacement(self, remembered: Any) -> Replacement:
        """Return what runs in the place of the scripted code."""
        if self.mode is JitMode.MARSHAL:
            return self._marshal
        original = (
            remembered if self.original is None else Name.of(self.original, "original").resolve(str(self))
        )
        if original is None:
            raise AdapterError(
                f"{self}: torch doesn't remember the Python original of this scripted code; name it by original="
            )

        def eager(scripted: Any, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return eager

    def _marshal(self, scripted: Any, *args: Any, **kwargs: Any) -> Any:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, ShardTensor)]
        if not given:
            return scripted(*args, **kwargs)
        result = scripted(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})
        several = isinstance(result, tuple)
        outputs = list(result) if several else [result]
        for position in self.row_outputs:
            outputs[position] = self._wrapped(position, outputs, given[0])
        return tuple(outputs) if several else outputs[0]

    def _wrapped(self, position: int, outputs: list[Any], like: ShardTensor) -> Any:
        x = outputs[position] if position < len(outputs) else None
        if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] != like.shape[0]:
            found = "nothing" if x is None else tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x)
            raise AdapterError(
                f"{self}: output {position} is declared to have the {like.shape[0]} rows of the first ShardTensor, "
                f"found {found}; name the outputs that have rows by row_outputs, () for none"
            )
        return ShardTensor.promote(x, like, like.kind)


def _inner(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod) else raw


def _script_method(name: str) -> Callable[..., Any]:
    """Return a function that calls the scripted method of an instance, past the class."""

    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return instance.__getattr__(name)(*args, **kwargs)

    call.__name__ = name
    return call


def _plain(x: Any) -> Any:
    return x.to_local() if isinstance(x, ShardTensor) else x
