"""The table of handlers and the dispatch trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvdd_core.tensor import REGISTRY, DispatchTrace, Handler, HandlerRegistry
from tests.tensor._rows import random, rows, single


def _handler(name: str, holds: bool = True) -> Handler:
    return Handler(name, lambda func, args, kwargs: holds, lambda func, args, kwargs: name)


def test_first_match_wins() -> None:
    registry = HandlerRegistry()
    a, b, c = _handler("a", holds=False), _handler("b"), _handler("c")
    for handler in (a, b, c):
        registry.register(torch.sin, handler)
    assert registry.match(torch.sin, (), {}) is b
    d = _handler("d")
    registry.register([torch.sin, torch.cos], d, first=True)
    assert registry.match(torch.sin, (), {}) is d
    assert registry.handlers(torch.sin) == (d, a, b, c)
    assert registry.match(torch.tan, (), {}) is None


def test_removal_restores_the_table() -> None:
    registry = HandlerRegistry()
    kept = registry.register(torch.sin, _handler("kept"))
    before = registry.handlers(torch.sin)
    gone = registry.register([torch.sin, torch.cos], _handler("gone"))
    gone.remove()
    gone.remove()
    assert registry.handlers(torch.sin) == before == (kept.handler,)
    assert registry.ops() == (torch.sin,)


def test_registering_twice_changes_nothing() -> None:
    registry = HandlerRegistry()
    handler = _handler("a")
    registry.register(torch.sin, handler)
    with pytest.raises(ValueError, match="'a' is already registered"):
        registry.register([torch.cos, torch.sin], handler)
    assert registry.ops() == (torch.sin,)


def test_a_kernel_can_be_taken_over_by_its_op() -> None:
    op = torch.ops.aten.sinh
    x = rows(random(3, 2), single(3))
    registration = REGISTRY.register([op, op.default], _handler("mine"))
    try:
        assert op(x) == op.default(x) == "mine"
        assert torch.equal(op(x.to_local()), torch.sinh(x.to_local()))
    finally:
        registration.remove()
    assert type(op(x)) is torch.Tensor


def test_handlers_see_plain_operations() -> None:
    seen: list[type] = []

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append(type(args[0] + 1.0))
        seen.append(type(torch.zeros_like(args[0])))
        return func(*args, **kwargs)

    registration = REGISTRY.register(torch.Tensor.asinh, Handler("look", lambda *_: True, run))
    try:
        rows(random(3, 2), single(3)).asinh()
    finally:
        registration.remove()
    assert seen == [torch.Tensor, torch.Tensor]


def test_trace_names_operations_and_handlers() -> None:
    x = rows(random(3, 2), single(3), n_systems=1)
    with DispatchTrace() as trace:
        out = torch.zeros_like(x)
        out.index_add_(0, torch.tensor([0, 1]), torch.ones(2, 2, dtype=torch.float64))
        torch.zeros(1, 2, dtype=torch.float64).index_add_(0, torch.zeros(3, dtype=torch.int64), x)
        _ = x * 2.0
    _ = x * 3.0
    assert [(r.op, r.handler) for r in trace.records] == [
        ("torch.zeros_like", "allocate_like"),
        ("torch.Tensor.index_add_", "row_scatter"),
        ("torch.Tensor.index_add_", "segment_reduce"),
        ("torch.Tensor.mul", "plain"),
    ]
    assert len(trace.handled) == 3
    assert all(r.moved == {} for r in trace.records)
    lines = trace.table().splitlines()
    assert lines[0].split() == ["operation", "handler", "calls", "bytes", "sent"]
    assert len(lines) == 5
    with trace, pytest.raises(RuntimeError, match="already recording"):
        trace.__enter__()
