"""An adapted op at work: transforms around the kernel, for calls with ShardTensors and for plain calls in a scope.

`OpPatch` puts a handler into ShardTensor's table and itself into the table of adapted ops, which
`PlainCalls`, a torch function mode, looks into.

Invariants: the kernel sees plain tensors; the outputs of exchanges are reported, so that every rank takes part in
their adjoints; the dispatch trace names the adapter for either sort of call.
Layer: adapters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from nvdd_core.adapters.base import Patch
from nvdd_core.adapters.transforms import ArgTransform, OutputTransform, ScatterOutputs, Transform
from nvdd_core.errors import AdapterConflictError, AdapterError
from nvdd_core.tensor import REGISTRY, Handler, Registration, RowKind, RowScope, ShardTensor
from nvdd_core.tensor.registry import Args, Kwargs, Op
from nvdd_core.tensor.shard_tensor import check_aligned
from nvdd_core.tensor.trace import DispatchRecord, active_trace, op_name

T = TypeVar("T", bound=Transform)

_ADAPTED: dict[Any, tuple[OpPatch, ...]] = {}
"""Adapted ops, overloads and their packets; replaced as a whole under the lock, never changed."""
_LOCK = threading.Lock()


class OpPatch(Patch):
    """The transforms around one op.

    Parameters
    ----------
    name : str
        The op for messages.
    overloads : sequence of OpOverload
        What is adapted.
    inputs, outputs
        Transforms by position.

    Raises
    ------
    AdapterError
        When a position is not that of a tensor that may be replaced.
    """

    def __init__(
        self,
        name: str,
        overloads: Sequence[OpOverload],
        inputs: Mapping[int, ArgTransform],
        outputs: Mapping[int, OutputTransform],
    ) -> None:
        self._name, self._overloads, self._inputs, self._outputs = name, tuple(overloads), inputs, outputs
        for overload in overloads:
            _check_positions(name, overload, inputs, outputs)
        self._ops = tuple(dict.fromkeys([*overloads, *(o.overloadpacket for o in overloads)]))
        self._keys = tuple(("op", str(o)) for o in overloads)
        self.handler = Handler(f"adapter:{name}", self._has_rows, self._run)
        self._registration: Registration | None = None

    def keys(self) -> tuple[Hashable, ...]:
        """Return what stands for the target; see `Patch.keys`."""
        return self._keys

    def apply(self) -> None:
        """Make the change; see `Patch.apply`."""
        global _ADAPTED  # noqa: PLW0603 - readers take the table as it is, without a lock
        with _LOCK:
            for op in self._overloads:
                for other in _ADAPTED.get(op, ()):
                    raise AdapterConflictError(
                        f"OpAdapter({self._name}): {op} is adapted already, by OpAdapter({other._name}); "
                        "restore that one first"
                    )
            _ADAPTED = {**_ADAPTED, **{op: (*_ADAPTED.get(op, ()), self) for op in self._ops}}
        self._registration = REGISTRY.register(self._ops, self.handler, first=True)

    def undo(self) -> None:
        """Take the change back; see `Patch.undo`."""
        global _ADAPTED  # noqa: PLW0603
        if self._registration is not None:
            self._registration.remove()
            self._registration = None
        with _LOCK:
            left = {op: tuple(p for p in patches if p is not self) for op, patches in _ADAPTED.items()}
            _ADAPTED = {op: patches for op, patches in left.items() if patches}

    # -- calls ---------------------------------------------------------------------------------------------

    def overload(self, func: Op, args: Args, kwargs: Kwargs) -> OpOverload | None:
        """Return the overload that a call reaches, None when it is not adapted."""
        if isinstance(func, OpOverload):
            return func
        packet: Any = func
        names = packet.overloads()
        chosen = names[0]
        if len(names) > 1:
            chosen = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
        found = getattr(packet, chosen)
        return found if found in self._overloads else None

    def _has_rows(self, func: Op, args: Args, kwargs: Kwargs) -> bool:
        return _first_rows(args, kwargs) is not None and self.overload(func, args, kwargs) is not None

    def _run(self, func: Op, args: Args, kwargs: Kwargs) -> Any:
        like, overload = _first_rows(args, kwargs), self.overload(func, args, kwargs)
        if like is None or overload is None:
            raise RuntimeError("the handler of an adapted op ran without its predicate")
        check_aligned(func, _rows(args, kwargs))
        return self.call(overload, args, kwargs, RowScope.of(like), like)

    def call(
        self, op: OpOverload, args: Args, kwargs: Kwargs, scope: RowScope, like: ShardTensor | None = None
    ) -> Any:
        """Run the op between its transforms; outputs that are rows become like `like`, if that is given."""
        plain, named = [_plain(a) for a in args], {k: _plain(v) for k, v in kwargs.items()}
        for position, transform in self._inputs.items():
            name = op._schema.arguments[position].name
            where = f"{self._name}, input {position} ({name!r})"
            if position < len(plain):
                plain[position] = _each(plain[position], transform, scope, where)
            elif name in named:
                named[name] = _each(named[name], transform, scope, where)
        result = op(*plain, **named)
        several = isinstance(result, tuple | list)
        outputs = list(result) if several else [result]
        for position, out_transform in self._outputs.items():
            where = f"{self._name}, output {position}"
            outputs[position] = _each(outputs[position], out_transform, scope, where)
        if like is not None:
            outputs = [self._promoted(position, x, like) for position, x in enumerate(outputs)]
        return type(result)(outputs) if several else outputs[0]

    def _promoted(self, position: int, x: Any, like: ShardTensor) -> Any:
        """Return an output that is declared to be local rows as such; a length alone says nothing."""
        if not isinstance(self._outputs.get(position), ScatterOutputs) or not isinstance(x, torch.Tensor):
            return x
        return ShardTensor.promote(x, like, RowKind.LOCAL)


def _check_positions(
    name: str,
    op: OpOverload,
    inputs: Mapping[int, ArgTransform],
    outputs: Mapping[int, OutputTransform],
) -> None:
    schema = op._schema
    for what, positions, values in (
        ("input", inputs, schema.arguments),
        ("output", outputs, schema.returns),
    ):
        for position in positions:
            if position >= len(values):
                raise AdapterError(
                    f"OpAdapter({name}): there is no {what} {position}; {schema} has {len(values)}, counted from 0"
                )
            value = values[position]
            if "Tensor" not in str(value.type):
                raise AdapterError(
                    f"OpAdapter({name}): {what} {position} of {schema} is no tensor but {value.type}"
                )
            if value.alias_info is not None and value.alias_info.is_write:
                raise AdapterError(
                    f"OpAdapter({name}): {what} {position} of {schema} is written in place, which a transform would "
                    "hide from the caller; adapt an op that returns its result"
                )


def _rows(args: Args, kwargs: Kwargs) -> Iterator[ShardTensor]:
    """Find the ShardTensors that know their distribution, lists of tensors included."""
    for value in (*args, *kwargs.values()):
        values: Iterable[Any] = value if type(value) in (list, tuple) else (value,)
        for x in values:
            if isinstance(x, ShardTensor) and x.row_layout is not None:
                yield x


def _first_rows(args: Args, kwargs: Kwargs) -> ShardTensor | None:
    return next(_rows(args, kwargs), None)


def _plain(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.to_local() if isinstance(value, ShardTensor) else value


def _each(value: Any, transform: T, scope: RowScope, where: str) -> Any:
    """Apply a transform to a tensor, to each tensor of a list, and to nothing else (an optional one left out)."""
    if type(value) in (list, tuple):
        return type(value)(_each(v, transform, scope, where) for v in value)
    return transform.apply(value, scope, where) if isinstance(value, torch.Tensor) else value


class PlainCalls(TorchFunctionMode):
    """Serves calls of adapted ops without a ShardTensor, by the scope that it is made with.

    It holds its scope itself, since autograd may run checkpointed code again in a thread of its own, which inherits
    the mode but no context.
    """

    def __init__(self, scope: RowScope) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self, func: Op, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for patch in _ADAPTED.get(func, ()):
            overload = patch.overload(func, args, kwargs)
            if overload is not None and _first_rows(args, kwargs) is None:
                return self._call(patch, overload, func, args, kwargs)
        through = _BACKWARD.get(func)
        if through is not None and ShardTensor not in types:
            with self:
                return through(*args, **kwargs)
        return func(*args, **kwargs)

    def _call(self, patch: OpPatch, overload: OpOverload, func: Op, args: Args, kwargs: Kwargs) -> Any:
        trace, mesh = active_trace(), self._scope.mesh
        if trace is None:
            return patch.call(overload, args, kwargs, self._scope)
        before = None if mesh is None else mesh.counter.snapshot()
        result = patch.call(overload, args, kwargs, self._scope)
        moved: dict[str, int] = {}
        if mesh is not None and before is not None:
            tally = mesh.counter.since(before)
            moved = {kind: tally.bytes.get(kind, 0) for kind in tally.calls}
        trace.records.append(DispatchRecord(op_name(func), patch.handler.name, moved))
        return result


def _past_the_mode(func: Any) -> Callable[..., Any]:
    """Return a function of torch without its question whether a mode wants to take over.

    A mode is off while it handles a call; during a backward pass it must be on, since checkpointed layers run
    their ops again there.
    """
    asks = ("has_torch_function", "has_torch_function_unary")
    if not set(asks) & set(
        func.__code__.co_names
    ):  # a torch that asks in another way: the copy would ask, too

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AdapterError(
                f"{func.__qualname__} of torch {torch.__version__} can't be run inside an evaluation with op adapters"
            )

        return refuse
    names = {**func.__globals__, **dict.fromkeys(asks, lambda _: False)}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


_BACKWARD = {
    f: _past_the_mode(f) for f in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
}


@contextmanager
def intercept_plain_calls(scope: RowScope) -> Iterator[None]:
    """Serve plain calls of adapted ops in this scope; costs nothing while no op is adapted.

    Keep it open until gradients are taken, where layers are checkpointed.
    """
    with PlainCalls(scope) if _ADAPTED else contextlib.nullcontext():
        yield
