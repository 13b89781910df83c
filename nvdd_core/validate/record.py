"""Records what a model's forward pass computes: every operation and verb, and what functions of its own code return.

`Recorder` is active between the call and the return of ``forward``. Operations are seen by a `TorchFunctionMode`, which
comes before ShardTensor's handlers, so what is recorded is what the model's line got; calls and returns are seen by a
profile function; modules by torch's global forward hooks. A result is named by line, operation and how often that
ran there. Of a verb of nvdd the result alone is recorded, since what it does inside depends on the number of ranks.

Invariant: recording changes no result; it ends when the scope ends, and stops early when it would fill the memory.
Layer: validate.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode, resolve_name

from nvdd_core.runtime import Model
from nvdd_core.validate.findings import Place
from nvdd_core.validate.places import is_model_code, is_nvdd_code, model_frame, place_of
from nvdd_core.validate.views import Layout, Summary, summarise

MEMORY = 512 * 2**20
"""Bytes of summaries that one rank keeps."""

Key = tuple[str, int, str, int]


@dataclass(frozen=True)
class Record:
    """One result.

    Attributes
    ----------
    place : Place
    op : str
    occurrence : int
        How often `op` gave a result at this line before.
    summary : Summary
    inputs : tuple of int
        Numbers of the records whose results it took.
    """

    place: Place
    op: str
    occurrence: int
    summary: Summary
    inputs: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        """What names the same result in another run."""
        return (self.place.file, self.place.line, self.op, self.occurrence)


@dataclass(frozen=True)
class ScriptCall:
    """A call of scripted code with a ShardTensor; `at` counts the records before it."""

    name: str
    place: Place
    scatters: tuple[str, ...]
    at: int


@dataclass
class Records:
    """What a recorder found on one rank.

    Attributes
    ----------
    ops, helpers : list of Record
        Operations in their order; results of functions, whose place is the function's first line.
    outputs : dict of str to Summary
        What ``forward`` returned.
    scripts : list of ScriptCall
    complete : bool
        False when memory ended the recording.
    """

    ops: list[Record]
    helpers: list[Record]
    outputs: dict[str, Summary]
    scripts: list[ScriptCall]
    complete: bool = True


class Recorder(TorchFunctionMode):
    """Records one forward pass; use `recording`.

    Parameters
    ----------
    model : Model
    layout : Layout
    """

    def __init__(self, model: Model, layout: Layout) -> None:
        super().__init__()
        self.found = Records([], [], {}, [])
        self._layout = layout
        self._forward = _code_of(model.forward)
        self._depth = 0 if self._forward is not None else 1
        self._names = {id(module): name for name, module in modules_of(model).items()}
        self._modules: list[str] = []
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._origin: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._taken: dict[int, tuple[int, ...]] = {}
        self._bytes = 0

    # -- operations ----------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation and keep a summary of its result."""
        kwargs = kwargs or {}
        inputs = self._origins((*args, *kwargs.values())) if self._listening else ()
        result = func(*args, **kwargs)
        if self._listening:
            # an assignment returns nothing: its result is what it wrote to
            target = args[0] if result is None and args else result
            self._keep(target, model_frame(sys._getframe(1)), str(resolve_name(func) or func), inputs)
        return result

    @property
    def _listening(self) -> bool:
        return self._depth > 0 and self.found.complete

    def _keep(self, value: Any, frame: FrameType | None, op: str, inputs: tuple[int, ...]) -> None:
        if frame is None:
            return
        place = place_of(frame, self._modules[-1] if self._modules else "")
        for k, tensor in enumerate(_tensors(value)):
            record = self._record(tensor, place, op + (f"[{k}]" if k else ""), inputs)
            if record is not None:
                self._origin[id(tensor)] = (weakref.ref(tensor), len(self.found.ops))
                self.found.ops.append(record)

    def _record(self, tensor: torch.Tensor, place: Place, op: str, inputs: tuple[int, ...]) -> Record | None:
        summary = summarise(tensor, self._layout)
        if summary is None:
            return None
        where = (place.file, place.line, op)
        occurrence = self._counts[where]
        self._counts[where] += 1
        self._bytes += summary.n_bytes
        self.found.complete = self._bytes < MEMORY
        return Record(place, op, occurrence, summary, inputs)

    def _origins(self, values: Iterable[Any]) -> tuple[int, ...]:
        """Return the numbers of the records that hold `values`."""
        tensors = (tensor for value in values for tensor in _tensors(value))
        made = [(tensor, self._origin.get(id(tensor))) for tensor in tensors]
        return tuple(dict.fromkeys(m[1] for tensor, m in made if m is not None and m[0]() is tensor))

    # -- functions -----------------------------------------------------------------------------------------

    def profile(self, frame: FrameType, event: str, value: Any) -> None:
        """Note the begin and the end of ``forward``, what verbs take and give, and what the model's functions give."""
        if event not in ("call", "return"):
            return
        if frame.f_code is self._forward:
            self._depth += 1 if event == "call" else -1
            if event == "return" and isinstance(value, Mapping):
                self._note_outputs(value)
        elif self._listening:
            with torch._C.DisableTorchFunction():  # or this would be recorded, too
                self._note_function(frame, event, value)

    def _note_function(self, frame: FrameType, event: str, value: Any) -> None:
        file = frame.f_code.co_filename
        if is_nvdd_code(file):
            caller = model_frame(frame.f_back)
            if caller is None or frame.f_code is _MODE:
                return
            if event == "call":
                self._taken[id(frame)] = self._origins(frame.f_locals.values())
            else:
                self._keep(value, caller, frame.f_code.co_qualname, self._taken.pop(id(frame), ()))
        elif event == "return" and value is not None and is_model_code(file):
            self._note_return(frame, value)

    def _note_outputs(self, value: Mapping[str, Any]) -> None:
        given = {str(name): t for name, t in value.items() if isinstance(t, torch.Tensor)}
        summaries = {name: summarise(t, self._layout) for name, t in given.items()}
        self.found.outputs = {name: summary for name, summary in summaries.items() if summary is not None}

    def _note_return(self, frame: FrameType, value: Any) -> None:
        code = frame.f_code
        place = Place(code.co_filename, code.co_firstlineno, code.co_qualname)
        items = value if isinstance(value, tuple | list) else [value]
        for k, item in enumerate(items):
            # a number may be a sum that was taken to the host
            tensor = torch.tensor(item, dtype=torch.float64) if isinstance(item, float) else item
            if isinstance(tensor, torch.Tensor):
                record = self._record(tensor, place, f"return[{k}]", ())
                if record is not None:
                    self.found.helpers.append(record)

    # -- modules and scripted code -------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, args: Any) -> None:
        """Note that a module's forward begins."""
        outer = self._modules[-1] if self._modules else ""
        self._modules.append(self._names.get(id(module), outer))

    def leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Note that a module's forward ended."""
        if self._modules:
            self._modules.pop()

    def note_script(self, name: str, scatters: tuple[str, ...]) -> None:
        """Note that scripted code is about to take a ShardTensor."""
        frame = model_frame(sys._getframe(2))
        if frame is not None:
            place = place_of(frame, self._modules[-1] if self._modules else "")
            self.found.scripts.append(ScriptCall(name, place, scatters, len(self.found.ops)))


@contextmanager
def recording(recorder: Recorder) -> Iterator[Records]:
    """Record what happens in the body; yields what is found."""
    before = sys.getprofile()
    with ExitStack() as stack:
        enter = torch_modules.register_module_forward_pre_hook(recorder.enter_module)
        stack.callback(enter.remove)
        leave = torch_modules.register_module_forward_hook(recorder.leave_module, always_call=True)
        stack.callback(leave.remove)
        stack.enter_context(recorder)
        stack.callback(sys.setprofile, before)
        sys.setprofile(recorder.profile)
        yield recorder.found


def modules_of(model: object) -> dict[str, torch.nn.Module]:
    """Return all torch modules in a model by qualified name, its attributes' names first; itself is "".

    A module that has two names is there once.
    """
    roots = {"": model} if isinstance(model, torch.nn.Module) else getattr(model, "__dict__", {})
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for root, value in roots.items():
        if isinstance(value, torch.nn.Module):
            for name, module in value.named_modules(prefix=root):
                found.setdefault(id(module), (name, module))
    return dict(found.values())


def _code_of(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item


_MODE = Recorder.__torch_function__.__code__
"""Called between a model's line and torch without being a verb."""
