"""ShardTensor: a tensor of rows that knows how its rows are spread over ranks.

It holds the same storage as the tensor it wraps plus a few fields, and sends each operation through
``__torch_function__``: the first handler in `REGISTRY` whose predicate holds runs, otherwise the operation
runs on the rows as on a plain tensor. Like-shaped allocators, copies and moves keep the class and its fields;
nearly everything else gives a plain tensor, with autograd intact.

What the rows are is declared, never read off a shape where that could be wrong: `wrap` takes a `kind`, and a
tensor whose length fits both local rows and segments is marked as open (`_open`) until its use decides, the
same way on every rank (see `handlers.scatter`).

Invariants: an in-place operation returns the very object it was called on; combining tensors with different
metadata objects raises on every rank; no operation without a handler communicates.
Layer: tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.compiler import is_dynamo_compiling

from nvdd_core.errors import SpecError
from nvdd_core.tensor.compiling import NotTraceable, skip_compilation
from nvdd_core.tensor.kinds import check_storage, resolve_kind
from nvdd_core.tensor.lookup import GatherMetadata
from nvdd_core.tensor.meta import ParticleHaloConfig, ParticleHaloMetadata, RowLayout
from nvdd_core.tensor.modes import DEFAULT_RULES, DispatchRules, DispatchSpec, RowKind
from nvdd_core.tensor.registry import REGISTRY, Handler
from nvdd_core.tensor.trace import PLAIN, DispatchRecord, DispatchTrace, active_trace, op_name

T = TypeVar("T")

_OP_TYPES = frozenset({OpOverload, OpOverloadPacket})
_BUILTIN_NAMESPACES = frozenset({"aten", "prim", "prims"})
_NO_KWARGS: dict[str, Any] = {}


class ShardTensor(torch.Tensor):
    """A tensor whose dim 0 is spread over ranks; made by `wrap`.

    Attributes
    ----------
    _spec : DispatchSpec or None
        What follows operations on these rows.
    _meta : ParticleHaloMetadata or None
        Sizes and routes of the halo.
    _gather_meta : GatherMetadata or None
        Owners by global id, for sharded storage; never beside `_meta`.
    _config : ParticleHaloConfig or None
        The mesh and the ghost width.
    _n_systems : int or None
        Number of segments, the same on every rank.
    _kind : RowKind or None
        What dim 0 counts; None without metadata.
    _open : bool
        The length fits `_kind` and segments alike, and nobody has said which is meant.
    """

    _spec: DispatchSpec | None = None
    _meta: ParticleHaloMetadata | None = None
    _gather_meta: GatherMetadata | None = None
    _config: ParticleHaloConfig | None = None
    _n_systems: int | None = None
    _kind: RowKind | None = None
    _open: bool = False

    _FIELDS: ClassVar[tuple[str, ...]] = (
        "_spec",
        "_meta",
        "_gather_meta",
        "_config",
        "_n_systems",
        "_kind",
        "_open",
    )

    @classmethod
    def wrap(
        cls,
        t: torch.Tensor,
        *,
        spec: DispatchSpec | None,
        meta: ParticleHaloMetadata | None = None,
        config: ParticleHaloConfig | None = None,
        n_systems: int | None = None,
        gather_meta: GatherMetadata | None = None,
        kind: RowKind | None = None,
    ) -> ShardTensor:
        """Return a ShardTensor on the storage of `t`, inside its autograd graph.

        Parameters
        ----------
        t : Tensor, shape (rows, *F)
        spec : DispatchSpec or None
            Rules for the handlers; None keeps every operation local.
        meta, config
            The halo of these rows and the mesh that serves it.
        n_systems : int, optional
            Number of segments, the same on every rank.
        gather_meta : GatherMetadata, optional
            Instead of `meta`, for sharded storage: owned rows, read and added to by global id.
        kind : RowKind, optional
            What dim 0 counts. Left out, it follows from the length: ``n_padded`` for local rows (sharded storage:
            ``n_owned`` for owned ones), `n_systems` for segments.

        Returns
        -------
        ShardTensor, shape (rows, *F)

        Raises
        ------
        SpecError
            When length, kind, metadata and spec don't fit together.
        """
        check_storage(spec, meta, gather_meta, config)
        chosen, is_open = resolve_kind(tuple(t.shape), meta or gather_meta, n_systems, kind)
        # Without a gradient of its own a view made under no_grad could not be written to later.
        with (
            torch._C.DisableTorchFunctionSubclass(),
            torch.set_grad_enabled(torch.is_grad_enabled() or not t.requires_grad),
        ):
            if t.numel():
                out: ShardTensor = t.as_subclass(cls)
            else:
                # An empty view written in place loses its second derivative in autograd, and with it this rank's part
                # in the exchanges there. A copy of nothing shares all that there is.
                out = cast(ShardTensor, t.clone())
                out.__class__ = cls
        out._spec, out._meta, out._gather_meta, out._config = spec, meta, gather_meta, config
        out._n_systems, out._kind, out._open = n_systems, chosen, is_open
        return out

    @classmethod
    def promote(cls, t: torch.Tensor, like: ShardTensor, kind: RowKind | None = None) -> ShardTensor:
        """Return `t` wrapped with the fields of `like`; see `wrap` for `kind`."""
        return cls.wrap(
            t,
            spec=like._spec,
            meta=like._meta,
            config=like._config,
            n_systems=like._n_systems,
            gather_meta=like._gather_meta,
            kind=kind,
        )

    @property
    def row_layout(self) -> RowLayout | None:
        """How the rows are distributed, whichever the storage; None without metadata."""
        return self._meta or self._gather_meta

    @property
    def kind(self) -> RowKind | None:
        """What dim 0 counts, None without metadata."""
        return self._kind

    @property
    def rules(self) -> DispatchRules:
        """The rules of the spec, or the ones that keep everything local."""
        return DEFAULT_RULES if self._spec is None else self._spec.dispatch_rules

    def to_local(self) -> torch.Tensor:
        """Return this rank's rows as a plain tensor on the same storage, inside the autograd graph."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if is_dynamo_compiling():
            raise NotTraceable("a function that handles ShardTensors is not compiled")
        for other in types:
            # torch.autograd.grad names plain tensors as well
            if other is not ShardTensor and other is not torch.Tensor and not issubclass(other, ShardTensor):
                return NotImplemented
        if kwargs is None:
            kwargs = _NO_KWARGS
        with torch._C.DisableTorchFunctionSubclass():
            handler = REGISTRY.match(func, args, kwargs)
            trace = active_trace()
            if trace is not None:
                return _traced(trace, handler, func, args, kwargs)
            return _run(handler, func, args, kwargs)

    def _set_fields(self, fields: Mapping[str, Any]) -> None:
        for name in self._FIELDS:
            setattr(self, name, fields[name])

    def __copy__(self) -> ShardTensor:
        with torch._C.DisableTorchFunctionSubclass():
            return inherit(self.as_subclass(torch.Tensor), self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            found: ShardTensor = memo[id(self)]
            return found
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad and not self.is_leaf:
                raise RuntimeError(
                    "a ShardTensor inside an autograd graph can't be deep-copied, no more than any other "
                    "tensor; copy x.detach() instead"
                )
            out = inherit(self.detach().clone(), self)
            out.requires_grad_(self.requires_grad)
            if self.grad is not None:
                out.grad = self.grad.detach().clone()
        memo[id(self)] = out
        return out

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        with torch._C.DisableTorchFunctionSubclass():
            if self.requires_grad and not self.is_leaf:
                raise RuntimeError(
                    "a ShardTensor inside an autograd graph can't be pickled, no more than any other tensor; "
                    "pickle x.detach() instead"
                )
            rows = self.detach().as_subclass(torch.Tensor)
            return _rebuild, (
                type(self),
                rows,
                self.requires_grad,
                {name: getattr(self, name) for name in self._FIELDS},
            )


skip_compilation(ShardTensor.__torch_function__)


def inherit(t: torch.Tensor, like: ShardTensor) -> ShardTensor:
    """Turn the new plain tensor `t`, which nobody else holds, into a ShardTensor with the fields of `like`.

    Changing the class of a new object, as torch does for its lazy parameters, adds neither a view nor an
    autograd node; a view made under no_grad could not be written to with gradients later.
    """
    t.__class__ = ShardTensor
    out = cast(ShardTensor, t)
    out._spec = like._spec
    out._meta = like._meta
    out._gather_meta = like._gather_meta
    out._config = like._config
    out._n_systems = like._n_systems
    out._kind = like._kind
    out._open = like._open
    return out


def check_aligned(func: Any, shards: Iterable[ShardTensor]) -> None:
    """Raise when `func` would combine rows of two different distributions.

    Raises
    ------
    SpecError
        On every rank, whatever the sizes are there.
    """
    first: RowLayout | None = None
    for x in shards:
        layout = x._meta or x._gather_meta
        if first is None:
            first = layout
        elif layout is not None and not layout.aligned_with(first):
            raise _misaligned(first, layout, func)


def _misaligned(a: RowLayout, b: RowLayout, func: Any) -> SpecError:
    sizes = "; ".join(f"owned {m.n_owned}, local {m.n_padded}" for m in (a, b))
    return SpecError(
        f"{op_name(func)} combines ShardTensors with different row metadata ({sizes}): they "
        "belong to different distributions, or one is older than the last rebuild. Bring both to one "
        "distribution first (reshard_by_destination), or use x.to_local() where plain local rows are meant"
    )


def _run(
    handler: Handler | None, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if handler is not None:
        return handler.run(func, args, kwargs)
    if len(args) > 1 or kwargs or type(args[0]) in (list, tuple):
        check_aligned(func, _shards(args, kwargs))
    if type(func) in _OP_TYPES and _namespace(func) not in _BUILTIN_NAMESPACES:
        # A kernel's Python code, and its backward above all, must not dispatch on what it is handed.
        return func(*_localized(args), **{k: _localized(v) for k, v in kwargs.items()})
    return func(*args, **kwargs)


def _traced(
    trace: DispatchTrace,
    handler: Handler | None,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    layouts = [x.row_layout for x in _shards(args, kwargs)]
    counters = {id(layout.mesh): layout.mesh.counter for layout in layouts if layout is not None}
    before = [(c, c.snapshot()) for c in counters.values()]
    result = _run(handler, func, args, kwargs)
    moved: dict[str, int] = {}
    for counter, snapshot in before:
        tally = counter.since(snapshot)
        for name in tally.calls:
            moved[name] = moved.get(name, 0) + tally.bytes.get(name, 0)
    trace.records.append(DispatchRecord(op_name(func), PLAIN if handler is None else handler.name, moved))
    return result


def _shards(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[ShardTensor]:
    """Return the ShardTensors among the arguments, lists of tensors included."""
    found: list[ShardTensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ShardTensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found.extend(v for v in value if isinstance(v, ShardTensor))
    return found


def _namespace(func: Any) -> str:
    if isinstance(func, OpOverload):
        return str(func.namespace)
    return str(func._qualified_op_name).partition("::")[0]


def _localized(value: T) -> T | torch.Tensor | list[Any] | tuple[Any, ...]:
    """Replace ShardTensors by plain tensors, also one level down in a list or tuple."""
    if isinstance(value, ShardTensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, (list, tuple)):
        return type(value)(_localized(v) for v in value)
    return value


def _rebuild(
    cls: type[ShardTensor], rows: torch.Tensor, requires_grad: bool, fields: Mapping[str, Any]
) -> ShardTensor:
    with torch._C.DisableTorchFunctionSubclass():
        out: ShardTensor = rows.as_subclass(cls)
        out._set_fields(fields)
        out.requires_grad_(requires_grad)
    return out
