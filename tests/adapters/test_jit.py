"""TorchScript: plain tensors in and rows out again, or the Python original in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvdd_core.adapters import AdapterRegistry, JitAdapter
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.tensor import DispatchTrace, RowKind, ShardTensor
from tests.adapters import foreign
from tests.tensor._rows import rows, single

X = torch.randn(4, 2)
INDEX, SOURCE = torch.tensor([0, 0, 3]), torch.ones(3, 2)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    foreign.Scripted()  # the first one changes the class, which is none of our doing
    before = dict(vars(foreign)), dict(vars(foreign.Scripted))
    yield
    after = dict(vars(foreign)), dict(vars(foreign.Scripted))
    for b, a in zip(before, after, strict=True):
        assert a.keys() == b.keys()
        assert all(a[k] is b[k] for k in b)


def test_marshal_function() -> None:
    x = rows(X, single(4))
    adapter = JitAdapter(foreign.scripted)
    assert adapter.target == "tests.adapters.foreign:scripted"
    with AdapterRegistry([adapter]):
        out = foreign.scripted(x, by=2.0)
        assert isinstance(out, ShardTensor)
        assert out.kind is RowKind.LOCAL
        assert torch.equal(out.to_local(), torch.tanh(X) * 2)
        assert type(foreign.scripted(X, 2.0)) is torch.Tensor
    with AdapterRegistry([JitAdapter("tests.adapters.foreign:scripted", row_outputs=())]):
        assert type(foreign.scripted(x, 2.0)) is torch.Tensor


def test_marshal_refuses_what_has_no_rows() -> None:
    adapter = JitAdapter(foreign.scripted, row_outputs=(1,))
    with AdapterRegistry([adapter]), pytest.raises(AdapterError, match=r"output 1 .* 4 rows"):
        foreign.scripted(rows(X, single(4)), 1.0)


@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("tests.adapters.foreign:scripted_sum", lambda x: foreign.scripted_sum(x, INDEX, SOURCE)),
        ("tests.adapters.foreign:Scripted.act", lambda x: foreign.Scripted.act(x, INDEX, SOURCE)),
    ],
)
def test_eager_shows_the_operations(target: str, call: Any) -> None:
    x = rows(X, single(4))
    expected = torch.tensor([2.0, 0.0, 0.0, 1.0])[:, None].expand(4, 2)
    for adapters, handlers in (([], []), ([JitAdapter(target, "eager")], ["allocate_like", "row_scatter"])):
        with AdapterRegistry(adapters), DispatchTrace() as trace:
            out = call(x)
        assert torch.equal(torch.Tensor.as_subclass(out, torch.Tensor), expected)
        assert [r.handler for r in trace.handled] == handlers


def test_script_method() -> None:
    module, x = foreign.Scripted(), rows(X, single(4))
    target = "tests.adapters.foreign:Scripted.forward"
    with AdapterRegistry([JitAdapter(target)]):
        assert isinstance(module(x), ShardTensor)
        assert torch.equal(module(x).to_local(), torch.sin(X) + 1)
        assert type(module(X)) is torch.Tensor
    with AdapterRegistry([JitAdapter(target, "eager")]), DispatchTrace() as trace:
        assert torch.equal(module(x), torch.sin(X) + 1)
    assert "torch.sin" in {r.op for r in trace.records}
    assert torch.equal(module(X), torch.sin(X) + 1)


def test_given_original() -> None:
    adapter = JitAdapter(foreign.scripted, "eager", original=lambda x, by: x * 0 + by)
    with AdapterRegistry([adapter]):
        assert torch.equal(foreign.scripted(X, 5.0), torch.full((4, 2), 5.0))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: JitAdapter(foreign.scripted, "fast"), SpecError, "marshal"),
        (lambda: JitAdapter(foreign.scripted, row_outputs=(-1,)), SpecError, "positions"),
        (lambda: JitAdapter(foreign.scale).install(), AdapterError, "use FunctionAdapter"),
        (
            lambda: JitAdapter("tests.adapters.foreign:Block.forward").install(),
            AdapterError,
            "FunctionAdapter",
        ),
        (
            lambda: JitAdapter("tests.adapters.foreign:Block.none").install(),
            AdapterError,
            "no such attribute",
        ),
    ],
)
def test_errors(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()
