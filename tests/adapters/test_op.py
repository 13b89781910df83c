"""`OpAdapter` in one process: what it accepts, positions and keywords, interception, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvdd_core.adapters import (
    AdapterRegistry,
    AllReduceSum,
    GatherInputs,
    OpAdapter,
    ScatterOutputs,
    SliceOwned,
    intercept_plain_calls,
)
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.tensor import REGISTRY, DispatchTrace, RowKind, RowScope, ShardTensor
from tests.adapters.ops import both, edge_sum, edge_sum_backward
from tests.tensor._rows import Rules, rows, single

X = torch.randn(4, 2, dtype=torch.float64)
SENDERS, RECEIVERS = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 1, 3, 0])


def test_two_forms_are_equal() -> None:
    by_role = OpAdapter(
        both, gather_inputs=[0], owned_slice_inputs=[1], scatter_outputs=(0,), all_reduce_outputs=[1]
    )
    by_dict = OpAdapter(
        torch.ops.toy.both,
        {1: SliceOwned(), 0: GatherInputs()},
        {0: ScatterOutputs(), 1: AllReduceSum()},
        install_site="elsewhere",
    )
    assert by_role == by_dict
    assert hash(by_role) == hash(by_dict)
    assert by_role.op == by_role.target == "toy::both"
    assert dict(by_role.arg_transforms) == {0: GatherInputs(), 1: SliceOwned()}
    assert OpAdapter(both, neighbors_inputs=[0]) == OpAdapter(both, gather_inputs=[0])
    assert OpAdapter(torch.ops.toy.both.default).op == "toy::both.default"


def test_replicated_outputs() -> None:
    adapter = OpAdapter(both, all_reduce_outputs=[0, 1], all_reduce_replicated_outputs=[1])
    assert adapter.all_reduce_replicated_outputs == (1,)
    assert adapter.output_transforms[0] == AllReduceSum()
    assert OpAdapter(both, all_reduce_replicated_outputs=[1]).all_reduce_replicated_outputs == (1,)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: OpAdapter("both"), "custom op"),
        (lambda: OpAdapter(torch.relu), "custom op"),
        (lambda: OpAdapter(both, {0: ScatterOutputs()}), "GatherInputs"),
        (lambda: OpAdapter(both, gather_inputs=[0], owned_slice_inputs=[0]), "two roles"),
        (lambda: OpAdapter(both, gather_inputs=[-1]), "counted from 0"),
        (lambda: AllReduceSum(replicated="yes"), "bool"),
    ],
)
def test_malformed(call: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        call()


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (OpAdapter("toy::nothing"), "import the module"),
        (OpAdapter("nobody::nothing"), "import the module"),
        (OpAdapter("toy::both.other"), "it has default"),
        (OpAdapter(both, gather_inputs=[2]), "no input 2"),
        (OpAdapter(both, scatter_outputs=[2]), "no output 2"),
        (OpAdapter(edge_sum, gather_inputs=[3]), "no tensor"),
        (OpAdapter("toy::write", gather_inputs=[0]), "in place"),
    ],
)
def test_refused_at_install(adapter: OpAdapter, text: str) -> None:
    with pytest.raises(AdapterError, match=text):
        adapter.install()
    assert not [op for op in REGISTRY.ops() if "toy" in str(op)]


def test_named_before_it_exists() -> None:
    adapter = OpAdapter("toy_later::op", gather_inputs=[0])
    with pytest.raises(AdapterError, match="toy_later::op"):
        adapter.install()

    @torch.library.custom_op("toy_later::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    adapter.restore(adapter.install())


def test_one_rank_is_plain_torch_and_traced() -> None:
    adapter = OpAdapter(edge_sum, gather_inputs=[0], scatter_outputs=[0])
    x = rows(X.clone().requires_grad_(), single(4))
    expected = edge_sum(X, SENDERS, RECEIVERS, 4)
    with AdapterRegistry([adapter]), DispatchTrace() as trace:
        for out in (
            edge_sum(x, SENDERS, RECEIVERS, 4),
            torch.ops.toy.edge_sum(x, SENDERS, n=4, receivers=RECEIVERS),
            torch.ops.toy.edge_sum.default(x=x, senders=SENDERS, receivers=RECEIVERS, n=4, bias=None),
        ):
            assert isinstance(out, ShardTensor)
            assert out.kind is RowKind.LOCAL
            assert torch.equal(out.to_local(), expected)
    assert [r.handler for r in trace.handled if "toy" in r.op] == ["adapter:toy::edge_sum"] * 3
    assert not isinstance(edge_sum(x, SENDERS, RECEIVERS, 4), ShardTensor)  # as torch has it again


def test_positions_by_keyword_and_wrong_rows() -> None:
    x = rows(X, single(4))
    with AdapterRegistry([OpAdapter(edge_sum, gather_inputs=[0])]):
        for call in (
            lambda: edge_sum(X[:3], SENDERS, RECEIVERS, n=4, bias=x),
            lambda: edge_sum(bias=x, x=X[:3], senders=SENDERS, receivers=RECEIVERS, n=4),
        ):
            with pytest.raises(AdapterError, match=r"toy::edge_sum, input 0 \('x'\): expected 4 .* \(3, 2\)"):
                call()


def test_several_outputs() -> None:
    x = rows(X, single(4), n_systems=2)
    for roles in ({"scatter_outputs": [0]}, {}):
        with AdapterRegistry([OpAdapter(both, gather_inputs=[0], all_reduce_outputs=[1], **roles)]):
            square, total = both(x, X)
        assert type(square) is (ShardTensor if roles else torch.Tensor)  # the length alone says nothing
        assert type(total) is torch.Tensor  # as many entries as segments, and no rows
        assert torch.equal(square.as_subclass(torch.Tensor), X * X)
    assert torch.equal(total, (X * X * X).sum(0))


def test_overloads_of_one_name() -> None:
    x, by = rows(X, single(4)), torch.full((4, 2), 3.0, dtype=torch.float64)
    many = torch.ops.toy.many
    with AdapterRegistry([OpAdapter("toy::many.scaled", gather_inputs=[0])]), DispatchTrace() as trace:
        results = [many(x, by), many(x), many.scaled(x, by), many.plain(x)]
    names = [r.handler for r in trace.records if "many" in r.op]
    assert names == ["adapter:toy::many.scaled", "plain"] * 2
    assert torch.equal(results[0], X * 3)
    assert torch.equal(results[1], X + 1)
    both_ways = [OpAdapter("toy::many.scaled", gather_inputs=[0]), OpAdapter("toy::many.plain")]
    scope = RowScope(meta=single(4), spec=Rules())
    with AdapterRegistry(both_ways), intercept_plain_calls(scope), DispatchTrace() as trace:
        many(X, by), many(x), many(X)
    assert [r.handler.rpartition(".")[2] for r in trace.records if "many" in r.op] == [
        "scaled",
        "plain",
        "plain",
    ]


def test_lists_of_tensors() -> None:
    x = rows(X, single(4))
    with AdapterRegistry([OpAdapter("toy::stack", gather_inputs=[0])]):
        assert torch.equal(torch.ops.toy.stack([x, X]), 2 * X)
        with pytest.raises(AdapterError, match="expected 4"):
            torch.ops.toy.stack([x, X[:2]])


def test_two_distributions() -> None:
    a, b = rows(X, single(4)), rows(X, single(4))
    with AdapterRegistry([OpAdapter(both, gather_inputs=[0])]), pytest.raises(SpecError, match="different"):
        both(a, b)


def test_plain_calls_outside_a_scope_run_untouched() -> None:
    with AdapterRegistry([OpAdapter(edge_sum, gather_inputs=[0])]):
        assert edge_sum(X[:3], SENDERS[:3], RECEIVERS[:3], 9).shape == (9, 2)


def test_plain_calls_in_a_scope() -> None:
    scope = RowScope(meta=single(4), spec=Rules())
    adapter = OpAdapter(edge_sum, gather_inputs=[0])
    with intercept_plain_calls(scope):  # nothing is adapted
        assert edge_sum(X[:3], SENDERS[:3], RECEIVERS[:3], 9).shape == (9, 2)
    with AdapterRegistry([adapter]), intercept_plain_calls(scope), DispatchTrace() as trace:
        out = edge_sum(X, SENDERS, RECEIVERS, 4)
        assert type(out) is torch.Tensor
        with pytest.raises(AdapterError, match="expected 4"):
            torch.ops.toy.edge_sum(X[:3], SENDERS, RECEIVERS, 4)
        assert torch.equal(edge_sum(rows(X, single(4)), SENDERS, RECEIVERS, 4), out)
    assert [r.handler for r in trace.records if "edge_sum" in r.op] == ["adapter:toy::edge_sum"] * 2


@pytest.mark.parametrize("way", ["grad", "backward", "method"])
def test_checkpointed_layers_are_served_again(way: str) -> None:
    calls: list[str] = []
    w = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def layer(w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(edge_sum(torch.tanh(X * w), SENDERS, RECEIVERS, 4))

    with (
        AdapterRegistry([OpAdapter(edge_sum, gather_inputs=[0])]),
        intercept_plain_calls(RowScope(meta=single(4), spec=Rules())),
        DispatchTrace() as trace,
    ):
        y = torch.utils.checkpoint.checkpoint(layer, w, use_reentrant=False).sum()
        if way == "grad":
            (grad,) = torch.autograd.grad(y, w)
        elif way == "backward":
            torch.autograd.backward(y)
        else:
            y.backward()
        calls = [r.handler for r in trace.records if "edge_sum" in r.op]
    assert calls == ["adapter:toy::edge_sum"] * 2
    (expected,) = torch.autograd.grad(layer(w).sum(), w)
    torch.testing.assert_close(grad if way == "grad" else w.grad, expected)


def test_backward_ops_are_not_adapted() -> None:
    assert edge_sum_backward._qualname != edge_sum._qualname
    x = X.clone().requires_grad_()
    with AdapterRegistry([OpAdapter(edge_sum, gather_inputs=[0])]):
        out = edge_sum(rows(x, single(4)), SENDERS, RECEIVERS, 4)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    y = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(edge_sum(y, SENDERS, RECEIVERS, 4).square().sum(), y)
    torch.testing.assert_close(grad, expected)
