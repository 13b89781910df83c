"""Every spelling of a scatter, and which of its meanings a call has, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.errors import SpecError
from nvdd_core.tensor import ParticleHaloMetadata, RowKind, ScatterMode, ShardTensor
from nvdd_core.tensor.handlers import scatter
from nvdd_core.tensor.handlers.calls import SCATTER_OPS, parse
from nvdd_core.tensor.handlers.scatter import Route
from tests.tensor._rows import Rules, random, rows, single

pytestmark = pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")

IDX = torch.tensor([0, 2, 2, 4])
WIDE = IDX[:, None].expand(4, 3)
T = torch.Tensor
aten = torch.ops.aten

SPELLINGS: dict[str, Callable[[T, T], T]] = {
    "Tensor.scatter_add_": lambda d, s: d.scatter_add_(0, WIDE, s),
    "Tensor.scatter_add": lambda d, s: d.scatter_add(dim=0, index=WIDE, src=s),
    "torch.scatter_add": lambda d, s: torch.scatter_add(d, 0, WIDE, s),
    "torch.scatter_add kw": lambda d, s: torch.scatter_add(input=d, dim=-2, index=WIDE, src=s),
    "Tensor.index_add_": lambda d, s: d.index_add_(0, IDX, s),
    "Tensor.index_add_ alpha": lambda d, s: d.index_add_(0, IDX, s, alpha=2),
    "Tensor.index_add": lambda d, s: d.index_add(-2, IDX, source=s),
    "torch.index_add": lambda d, s: torch.index_add(d, 0, IDX, s, alpha=-1),
    "Tensor.scatter_reduce_": lambda d, s: d.scatter_reduce_(0, WIDE, s, "sum"),
    "Tensor.scatter_reduce": lambda d, s: d.scatter_reduce(0, WIDE, s, reduce="sum", include_self=True),
    "torch.scatter_reduce": lambda d, s: torch.scatter_reduce(d, 0, WIDE, s, "sum"),
    "Tensor.scatter_": lambda d, s: d.scatter_(0, WIDE, s, reduce="add"),
    "torch.scatter": lambda d, s: torch.scatter(d, 0, WIDE, s, reduce="add"),
    "Tensor.index_put_": lambda d, s: d.index_put_((IDX,), s, accumulate=True),
    "Tensor.index_put": lambda d, s: d.index_put((IDX,), s, True),
    "torch.index_put_": lambda d, s: torch.index_put_(d, (IDX,), s, accumulate=True),
    "torch.index_put": lambda d, s: torch.index_put(d, (IDX,), values=s, accumulate=True),
    "index_put two": lambda d, s: d.index_put_((IDX, torch.tensor([0, 1, 1, 2])), s[:, 0], accumulate=True),
    "aten.scatter_add_": lambda d, s: aten.scatter_add_(d, 0, WIDE, s),
    "aten.index_add.default": lambda d, s: aten.index_add.default(d, 0, IDX, s),
    "aten.index_put_.default": lambda d, s: aten.index_put_.default(d, [IDX], s, True),
    "aten.scatter_reduce.two": lambda d, s: aten.scatter_reduce.two(d, 0, WIDE, s, "sum"),
}


def in_place(name: str) -> bool:
    return name.split(maxsplit=1)[0].removesuffix(".default").endswith("_") or name == "index_put two"


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_rank_gives_what_plain_torch_gives(name: str) -> None:
    start, src = random(5, 3), random(4, 3, seed=1)
    expected = SPELLINGS[name](start.clone(), src)
    dest = rows(start.clone(), single(5))
    result = SPELLINGS[name](dest, src)
    assert torch.equal(result, expected)
    assert type(result) is ShardTensor
    assert (result is dest) == in_place(name)
    assert torch.equal(dest, expected if in_place(name) else start)


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("mode", list(ScatterMode))
def test_every_spelling_reaches_the_row_handler(
    name: str, mode: ScatterMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the exchange replaced by one that can be seen: +1 on ghosts, +10 for each reverse."""
    meta = _fake_halo(monkeypatch)
    start, src = random(5, 3), random(4, 3, seed=1)
    dest = rows(start.clone(), meta, Rules(mode))
    result = SPELLINGS[name](dest, src)
    expected = SPELLINGS[name](start.clone(), src)
    if mode is not ScatterMode.LOCAL:
        expected[3:] = 1.0
        expected[:3] += 10.0 if mode is ScatterMode.HALO_CORRECTION else 0.0
    torch.testing.assert_close(result.to_local(), expected, rtol=0, atol=1e-15)
    assert type(result) is ShardTensor


def _fake_halo(monkeypatch: pytest.MonkeyPatch) -> ParticleHaloMetadata:
    """Five local rows, three of them owned, whose exchange leaves a mark instead of communicating."""
    monkeypatch.setattr(HaloPlan, "is_trivial", property(lambda self: False))
    monkeypatch.setattr(
        HaloPlan, "forward", lambda self, owned: torch.cat([owned, owned.new_ones(2, *owned.shape[1:])])
    )
    monkeypatch.setattr(HaloPlan, "reverse", lambda self, local: local[:3] + 10.0)
    return ParticleHaloMetadata(HaloPlan(Mesh.single(), 3, torch.zeros(0, dtype=torch.int64), (0,), (2,)))


@pytest.mark.parametrize(
    "call",
    [
        lambda d, s: d.scatter_add_(1, torch.zeros(5, 3, dtype=torch.int64), s),
        lambda d, s: d.index_add_(1, torch.tensor([0, 1, 1]), s),
        lambda d, s: d.index_put_((IDX,), s[:4]),
        lambda d, s: aten.index_put_(d, [None, torch.tensor([0, 1, 1])], s, True),
        lambda d, s: d.scatter_(0, WIDE, s[:4]),
    ],
    ids=["scatter dim 1", "index dim 1", "assign", "columns", "scatter assign"],
)
def test_what_leaves_rows_apart_is_left_alone(
    call: Callable[[T, T], T], monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = _fake_halo(monkeypatch)
    start, src = random(5, 3), random(5, 3, seed=1)
    dest = rows(start.clone(), meta)
    assert call(dest, src) is dest
    assert torch.equal(dest, call(start.clone(), src))


@pytest.mark.parametrize("reduce", ["amax", "amin", "mean", "prod"])
def test_other_reductions_are_refused_where_ranks_would_have_to_combine_them(
    reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = _fake_halo(monkeypatch)
    src = random(4, 3)
    for dest, works in (
        (rows(random(5, 3), meta, Rules(ScatterMode.HALO_CORRECTION)), False),
        (rows(random(5, 3), meta, Rules(ScatterMode.REFRESH)), True),
        (rows(random(5, 3), meta, Rules(ScatterMode.LOCAL)), True),
    ):
        before = dest.to_local().clone()
        if works:
            dest.scatter_reduce_(0, WIDE, src, reduce)
            assert torch.equal(dest[:3], before.scatter_reduce(0, WIDE, src, reduce)[:3])
        else:
            with pytest.raises(SpecError, match=rf"halo_correction .*'{reduce}' reduction"):
                dest.scatter_reduce_(0, WIDE, src, reduce)
            with pytest.raises(SpecError, match="own values"):
                dest.scatter_reduce_(0, WIDE, src, "sum", include_self=False)
            assert torch.equal(dest, before)


def test_wrong_arguments_get_the_error_of_torch() -> None:
    dest = rows(random(5, 3), single(5))
    with pytest.raises(TypeError, match="index_add_"):
        dest.index_add_(0, IDX)  # type: ignore[call-arg]
    with pytest.raises((RuntimeError, IndexError)):
        dest.index_add_(0, torch.tensor([7]), random(1, 3))
    with pytest.raises(SpecError, match="takes no out="):
        torch.index_add(dest, 0, IDX, random(4, 3), out=torch.zeros(5, 3, dtype=torch.float64))


def test_rows_moved_off_the_device_of_their_routes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dest = rows(random(5, 3), _fake_halo(monkeypatch)).to("meta")
    with pytest.raises(SpecError, match=r"rows are on meta, their halo's routes on cpu"):
        dest.index_add_(0, IDX.to("meta"), random(4, 3).to("meta"))


# -- which of the meanings ---------------------------------------------------------------------------------------------


def _route(dest: T, index: T, source: T) -> Route:
    return scatter.route(parse(torch.Tensor.index_add_, (dest, 0, index, source), {}))


def test_routes_follow_tags() -> None:
    meta = single(2)
    local = rows(random(2, 1), meta, n_systems=2, kind=RowKind.LOCAL)
    owned = rows(random(2, 1), meta, n_systems=2, kind=RowKind.OWNED)
    segments = rows(random(2, 1), meta, n_systems=2, kind=RowKind.SEGMENTS)
    open_ = rows(random(2, 1), meta, n_systems=2)
    plain = random(2, 1)
    index = torch.tensor([0, 1])
    row_index = ShardTensor.promote(index, local, RowKind.LOCAL)
    assert open_._open
    for source, i in ((local, index), (owned, index), (plain, row_index), (open_, index)):
        assert _route(plain, i, source) is Route.INTO_SEGMENTS
        assert _route(segments, i, source) is Route.INTO_SEGMENTS
        assert _route(open_, i, source) is Route.INTO_SEGMENTS
        assert _route(local, i, source) is Route.ROWS_INTO_ROWS
        assert _route(owned, i, source) is Route.ROWS_INTO_ROWS
    assert _route(local, index, plain) is Route.INTO_ROWS
    assert _route(owned, index, plain) is Route.INTO_ROWS
    assert _route(open_, index, plain) is Route.INTO_ROWS
    assert _route(segments, index, plain) is Route.UNKNOWN_INTO_SEGMENTS
    assert _route(plain, index, plain) is Route.UNTOUCHED
    assert _route(plain, index, segments) is Route.SEGMENTS_SCATTERED
    assert _route(local, index, segments) is Route.SEGMENTS_SCATTERED
    bare = ShardTensor.wrap(random(2, 1), spec=None)
    assert _route(bare, index, plain) is Route.UNTOUCHED
    assert _route(plain, index, bare) is Route.UNTOUCHED


def test_refusals_say_what_to_do() -> None:
    meta = single(5)
    x = rows(random(5, 3), meta, n_systems=2)
    segments = rows(random(2, 3), meta, n_systems=2)
    five = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(
        SpecError, match=r"index_add_ \(destination \(5, 3\), index \(5,\)\).*ghosts.*to_local"
    ):
        torch.zeros_like(x).index_add_(0, torch.arange(5), x)
    with pytest.raises(SpecError, match=r"unknown kind.*promote"):
        segments.index_add_(0, five, random(5, 3))
    with pytest.raises(SpecError, match="segments are scattered"):
        torch.zeros(5, 3, dtype=torch.float64).index_add_(0, torch.tensor([0, 1]), segments)
    with pytest.raises(
        SpecError, match=r"plain tensor of 7 entries, but the number of segments is 2.*zeros_like"
    ):
        torch.zeros(7, 3, dtype=torch.float64).index_add_(0, five, x)
    with pytest.raises(SpecError, match=r"is not known \(pass n_systems"):
        torch.zeros(2, 3, dtype=torch.float64).index_add_(0, five, rows(random(5, 3), meta))
    with pytest.raises(SpecError, match="reduction 'amax'"):
        torch.zeros(2, 3, dtype=torch.float64).scatter_reduce_(0, five[:, None].expand(5, 3), x, "amax")
    with pytest.raises(SpecError, match="boolean mask"):
        torch.zeros(2, 1, dtype=torch.float64).index_put_(
            (torch.tensor([True, True]),), rows(random(2, 1), single(2), n_systems=2), accumulate=True
        )


@pytest.mark.parametrize("dest", ["plain", "new_zeros", "tagged"])
@pytest.mark.parametrize("tag", ["source", "index"])
def test_sum_by_segment_in_one_process(dest: str, tag: str) -> None:
    values, index = random(5, 3), torch.tensor([0, 1, 1, 0, 1])
    x = rows(values, single(5), n_systems=2)
    start = random(2, 3, seed=2)
    expected = start.index_add(0, index, values)
    made: Any = {
        "plain": start.clone(),
        "new_zeros": x.new_zeros(2, 3).copy_(start),
        "tagged": ShardTensor.promote(start.clone(), x, RowKind.SEGMENTS),
    }[dest]
    source, by = (x, index) if tag == "source" else (values, ShardTensor.promote(index, x, RowKind.LOCAL))
    out = made.index_add(0, by, source)
    torch.testing.assert_close(out.to_local() if dest != "plain" else out, expected)
    assert type(out) is (torch.Tensor if dest == "plain" else ShardTensor)
    assert made.index_add_(0, by, source) is made
    torch.testing.assert_close(made.as_subclass(torch.Tensor), expected)
    assert type(made.index_put_((by,), source, accumulate=True)) is type(made)
    scalar = torch.zeros(2, dtype=torch.float64).index_put_(
        (ShardTensor.promote(index, x, RowKind.LOCAL),),
        torch.tensor(1.0, dtype=torch.float64),
        accumulate=True,
    )
    assert scalar.tolist() == [2.0, 3.0]


# -- derivatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SPELLINGS if n not in {"Tensor.scatter_", "torch.scatter"}])
def test_derivatives_of_every_spelling(name: str) -> None:
    meta = single(5)

    def layer(start: T, src: T) -> T:
        dest = rows(start * start, meta)
        out = SPELLINGS[name](dest, src * src)
        if in_place(name):
            out = dest  # what code that drops the return value sees
        return out * out

    args = (random(5, 3).requires_grad_(), random(4, 3, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(layer, args)
    assert torch.autograd.gradgradcheck(layer, args)


def test_derivatives_of_a_sum_by_segment() -> None:
    index = torch.tensor([0, 1, 1, 0, 1])

    def layer(values: T, start: T) -> T:
        x = rows(values * values, single(5), Rules(system_reductions=True), n_systems=2)
        out = start * start
        out.index_add_(0, index, x)
        return out * out

    args = (random(5, 2).requires_grad_(), random(2, 2, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(layer, args)
    assert torch.autograd.gradgradcheck(layer, args)


def test_in_place_on_a_leaf_is_refused_as_in_torch() -> None:
    x = rows(random(5, 3), single(5)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.index_add_(0, IDX, random(4, 3))


def test_every_spelling_of_torch_is_known() -> None:
    names = {getattr(op, "__name__", str(op)) for op in SCATTER_OPS}
    assert {"scatter_add_", "scatter_add", "index_add_", "index_put_", "scatter_reduce_"} <= names
    families = {"scatter_add", "index_add", "scatter_reduce", "index_reduce", "scatter", "index_put"}
    for owner in (torch, torch.Tensor):
        for name in dir(owner):
            if name.rstrip("_") in families:
                assert getattr(owner, name) in SCATTER_OPS
