"""Notices scripted code that is handed a ShardTensor: the interpreter of scripts takes its rows as a plain tensor.

Torch calls scripts without asking ``__torch_function__``, so the calls themselves are watched, by adapters on the two
classes of scripted callables, for as long as a recording lasts.

Layer: validate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from nvdd_core.adapters import AdapterRegistry, MethodAdapter
from nvdd_core.tensor import ShardTensor
from nvdd_core.validate.record import Recorder

_RECORDER: ContextVar[Recorder | None] = ContextVar("nvdd_validate_recorder", default=None)
_HERE = "nvdd_core.validate.scripted"
_SCATTERS = ("scatter", "index_add", "index_put", "index_reduce")


def before_call(original: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any) -> Any:
    """Tell the recorder of a call that takes a ShardTensor; the replacement of both classes' ``__call__``."""
    recorder = _RECORDER.get()
    if recorder is not None and any(isinstance(value, ShardTensor) for value in (*args, *kwargs.values())):
        recorder.note_script(str(instance.name), scatters_of(instance))
    return original(instance, *args, **kwargs)


def scatters_of(scripted: Any) -> tuple[str, ...]:
    """Return the names of scatters in a script's graph, with what it calls inlined."""
    found = (node.kind().removeprefix("aten::") for node in _nodes(scripted.inlined_graph))
    return tuple(sorted({name for name in found if name.startswith(_SCATTERS)}))


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


@contextmanager
def watching_scripts(recorder: Recorder) -> Iterator[None]:
    """Let `recorder` know of scripted calls in the body."""
    token = _RECORDER.set(recorder)
    try:
        with AdapterRegistry(
            (
                MethodAdapter("torch._C:ScriptFunction", "__call__", f"{_HERE}:before_call"),
                MethodAdapter("torch._C:ScriptMethod", "__call__", f"{_HERE}:before_call"),
            ),
            owner="nvdd validate",
        ):
            yield
    finally:
        _RECORDER.reset(token)
