"""Wrapping, what keeps the class and what drops it, alignment, copies and pickles, in one process."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

from nvdd_core.comm import HaloPlan, Mesh
from nvdd_core.errors import DistributedError, SpecError
from nvdd_core.runtime import SPEC_MPNN_HALO
from nvdd_core.tensor import (
    GatherMetadata,
    ParticleHaloConfig,
    ParticleHaloMetadata,
    RowKind,
    ShardTensor,
    StorageKind,
    loading_onto,
    safe_globals,
)
from nvdd_core.tensor.meta import MeshPlace
from tests.tensor._rows import Rules, random, rows, single


@pytest.fixture
def x() -> ShardTensor:
    return rows(random(5, 3), single(5), n_systems=2)


def same_fields(a: torch.Tensor, b: ShardTensor) -> bool:
    return (
        type(a) is ShardTensor
        and a._spec is b._spec
        and a._meta is b._meta
        and a._config is b._config
        and a._n_systems == b._n_systems
        and a._kind is b._kind
    )


# -- wrap -----------------------------------------------------------------------------------------------------


def test_wrap_shares_storage_and_graph() -> None:
    t = random(5, 3).requires_grad_()
    x = rows(t, single(5))
    assert x.data_ptr() == t.data_ptr()
    assert (x._meta.n_owned, x._meta.n_padded, x._gather_meta) == (5, 5, None)  # type: ignore[union-attr]
    assert x._config.ghost_width == 1.0  # type: ignore[union-attr]
    (x * 2).sum().backward()
    assert torch.equal(t.grad, torch.full((5, 3), 2.0, dtype=torch.float64))  # type: ignore[arg-type]


def test_wrap_follows_in_place_changes() -> None:
    t = torch.zeros(5, 3)
    x = rows(t, single(5))
    x.add_(1.0)
    assert type(x) is ShardTensor
    assert torch.equal(t, torch.ones(5, 3))
    t.mul_(3.0)
    assert torch.equal(x.to_local(), torch.full((5, 3), 3.0))


def test_to_local_is_plain_and_shares_storage(x: ShardTensor) -> None:
    assert type(x.to_local()) is torch.Tensor
    assert x.to_local().data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [
        (
            (4, 3),
            None,
            r"shape \(4, 3\) with no kind fits none of the row counts \(local 5, owned 3, segments 2\)",
        ),
        ((), None, "fits none"),
        ((3, 1), None, "OWNED is never assumed"),
        ((5, 1), RowKind.OWNED, "kind 'owned'"),
        ((5, 1), RowKind.SEGMENTS, "kind 'segments'"),
    ],
)
def test_wrap_refuses_a_length_that_fits_no_kind(
    shape: tuple[int, ...], kind: RowKind | None, message: str
) -> None:
    meta = ParticleHaloMetadata(HaloPlan(Mesh.single(), 3, torch.zeros(0, dtype=torch.int64), (0,), (2,)))
    with pytest.raises(SpecError, match=message):
        rows(torch.zeros(shape), meta, n_systems=2, kind=kind)


def test_wrap_takes_owned_rows_and_segments_when_told() -> None:
    meta = ParticleHaloMetadata(HaloPlan(Mesh.single(), 3, torch.zeros(0, dtype=torch.int64), (0,), (2,)))
    assert rows(torch.zeros(3, 1), meta, kind=RowKind.OWNED).kind is RowKind.OWNED
    assert rows(torch.zeros(2, 1), meta, n_systems=2).kind is RowKind.SEGMENTS
    assert rows(torch.zeros(5, 1), meta, n_systems=2).kind is RowKind.LOCAL


def test_wrap_refuses_storage_it_does_not_serve() -> None:
    t = torch.zeros(5)
    with pytest.raises(SpecError, match="sharded storage"):
        ShardTensor.wrap(t, spec=Rules(storage=StorageKind.SHARDED))
    with pytest.raises(SpecError, match="sharded storage"):
        ShardTensor.wrap(t, spec=Rules(), gather_meta={"n_global": 3})  # type: ignore[arg-type]
    directory = GatherMetadata.build(Mesh.single(), torch.arange(5))
    with pytest.raises(SpecError, match="one storage"):
        ShardTensor.wrap(t, spec=None, meta=single(5), gather_meta=directory)
    with pytest.raises(SpecError, match="belongs to sharded storage, but the spec asks for halo"):
        ShardTensor.wrap(t, spec=Rules(), gather_meta=directory)
    with pytest.raises(SpecError, match=r"needs gather_meta=GatherMetadata\.build"):
        rows(t, single(5), Rules(storage=StorageKind.SHARDED))
    with pytest.raises(SpecError, match="replicated storage has no halo"):
        rows(t, single(5), Rules(storage=StorageKind.REPLICATED))


def test_wrap_refuses_two_meshes() -> None:
    with pytest.raises(SpecError, match="different meshes"):
        ShardTensor.wrap(
            torch.zeros(5), spec=Rules(), meta=single(5), config=ParticleHaloConfig(Mesh.single(), 1.0)
        )


@pytest.mark.parametrize("width", [-1.0, float("nan"), float("inf")])
def test_config_refuses_impossible_widths(width: float) -> None:
    with pytest.raises(SpecError, match="ghost width"):
        ParticleHaloConfig(Mesh.single(), width)


def test_tensor_made_under_no_grad_can_be_written_to_with_gradients() -> None:
    w = torch.ones(5, 3, requires_grad=True)
    with torch.no_grad():
        x = rows(torch.zeros(5, 3), single(5))
        made = [x, torch.zeros_like(x), x.clone(), x.detach(), x.new_zeros(5, 3), x.to(torch.float64).float()]
    for t in made:
        t.index_add_(0, torch.arange(5), w)
        assert t.requires_grad


# -- what keeps the class ---------------------------------------------------------------------------------------

KEEPS: dict[str, Callable[[ShardTensor], torch.Tensor]] = {
    "zeros_like": torch.zeros_like,
    "empty_like": torch.empty_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 2.0),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "zeros_like_input": lambda x: torch.zeros_like(input=x, dtype=torch.int64),
    "new_zeros": lambda x: x.new_zeros(5),
    "new_zeros_tuple": lambda x: x.new_zeros((5, 4, 2)),
    "new_zeros_shape": lambda x: x.new_zeros(x.shape),
    "new_empty": lambda x: x.new_empty(size=(5, 1)),
    "new_ones": lambda x: x.new_ones(5, 2),
    "new_full": lambda x: x.new_full((5,), 1.0),
    "clone": lambda x: x.clone(),
    "torch.clone": torch.clone,
    "detach": lambda x: x.detach(),
    "to dtype": lambda x: x.to(torch.float32),
    "to same": lambda x: x.to(x.dtype),
    "to device": lambda x: x.to("cpu"),
    "to other": lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "long": lambda x: x.long(),
    "cpu": lambda x: x.cpu(),
    "type": lambda x: x.type(torch.float32),
    "type_as": lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)),
    "contiguous": lambda x: x.contiguous(),
    "requires_grad_": lambda x: x.requires_grad_(),
    "in place": lambda x: x.mul_(2.0),
    "iadd": lambda x: x.__iadd__(1.0),
    "copy_": lambda x: x.copy_(torch.zeros(5, 3)),
    "parameter": torch.nn.Parameter,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("name", KEEPS)
def test_keeps_class_and_fields(x: ShardTensor, name: str) -> None:
    y = KEEPS[name](x)
    if name == "pickle":  # the fields are equal, not the same objects
        assert type(y) is ShardTensor
        assert (y._spec, y._n_systems, y._kind, y._open) == (x._spec, x._n_systems, x._kind, x._open)
        assert (y._meta.n_owned, y._meta.n_padded) == (5, 5)  # type: ignore[union-attr]
        assert y._config.mesh is y._meta.plan.mesh  # type: ignore[union-attr]
    else:
        assert same_fields(y, x)
    assert y.shape[0] == 5


DROPS: dict[str, Callable[[ShardTensor], torch.Tensor]] = {
    "add": lambda x: x + 1.0,
    "radd": lambda x: torch.ones(5, 3, dtype=torch.float64) + x,
    "mul": lambda x: x * x,
    "index": lambda x: x[torch.tensor([0, 2])],
    "slice": lambda x: x[:2],
    "row": lambda x: x[0],
    "index_select": lambda x: x.index_select(0, torch.tensor([1])),
    "linear": lambda x: torch.nn.functional.linear(x, torch.ones(2, 3, dtype=torch.float64)),
    "sum": lambda x: x.sum(),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "view": lambda x: x.view(-1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "T": lambda x: x.T,
    "data": lambda x: x.data,
    "other length": lambda x: x.new_zeros(7, 3),
    "plain to like": lambda x: torch.zeros(5, 3).to(x),
    "plain type_as": lambda x: torch.zeros(5, 3).type_as(x),
    "aten": lambda x: torch.ops.aten.sin(x),
}


@pytest.mark.parametrize("name", DROPS)
def test_gives_a_plain_tensor(x: ShardTensor, name: str) -> None:
    assert type(DROPS[name](x)) is torch.Tensor


def test_gradients_flow_through_kept_and_dropped_classes() -> None:
    t = random(5, 3).requires_grad_()
    x = rows(t, single(5))
    y = (x.clone().to(torch.float64).contiguous() * x[:, :1]).tanh() + x.double()
    (g,) = torch.autograd.grad(y.sum(), t)
    u = t.detach().requires_grad_()
    (h,) = torch.autograd.grad(((u * u[:, :1]).tanh() + u).sum(), u)
    torch.testing.assert_close(g, h, rtol=0, atol=1e-14)


def test_new_with_the_number_of_segments(x: ShardTensor) -> None:
    assert x.new_zeros(2, 4).kind is RowKind.SEGMENTS  # type: ignore[attr-defined]
    assert not x.new_zeros(2, 4)._open  # type: ignore[attr-defined]
    y = rows(torch.zeros(2, 3), single(2), n_systems=2)
    assert (y.kind, y._open) == (RowKind.LOCAL, True)
    z = y.new_zeros(2)
    assert (z.kind, z._open) == (RowKind.LOCAL, True)  # type: ignore[attr-defined]
    told = rows(torch.zeros(2, 3), single(2), n_systems=2, kind=RowKind.LOCAL)
    assert not torch.zeros_like(told)._open  # type: ignore[attr-defined]


def test_properties_and_printing(x: ShardTensor) -> None:
    assert (x.shape, len(x), x.device.type, x.is_leaf) == ((5, 3), 5, "cpu", True)
    assert repr(x).startswith("ShardTensor(")
    assert x.tolist() == x.to_local().tolist()


def test_state_dict_and_parameters(x: ShardTensor) -> None:
    module = torch.nn.Module()
    module.register_buffer("features", x)
    assert same_fields(module.state_dict()["features"], x)


# -- alignment --------------------------------------------------------------------------------------------------

PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": torch.mul,
    "where": lambda a, b: torch.where(torch.ones(5, 1, dtype=torch.bool), a, b),
    "cross": lambda a, b: torch.cross(a, b, dim=1),
    "cat": lambda a, b: torch.cat([a, b]),
    "compare": lambda a, b: a < b,
    "in place": lambda a, b: a.add_(b),
    "out": lambda a, b: torch.add(a, 1.0, out=b),
    "index_add": lambda a, b: a.index_add(0, torch.arange(5), b),
    "index_add_": lambda a, b: a.index_add_(0, torch.arange(5), b),
    "copy_": lambda a, b: a.copy_(b),
}


@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_two_distributions_are_not_combined(name: str) -> None:
    a, b = rows(random(5, 3), single(5)), rows(random(5, 3), single(5))
    with pytest.raises(SpecError, match=r"different row metadata|scattered into rows"):
        PAIRS[name](a, b)


@pytest.mark.parametrize("name", [n for n in PAIRS if not n.startswith("index_add")])
def test_rows_of_one_distribution_are_combined(name: str) -> None:
    meta = single(5)
    p, q = random(5, 3), random(5, 3, seed=1)
    expected = PAIRS[name](p.clone(), q.clone())
    assert torch.equal(PAIRS[name](rows(p.clone(), meta), rows(q.clone(), meta)), expected)


class _Foreign(torch.Tensor):
    """Somebody else's subclass, which counts what reaches it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return "foreign"


def test_other_subclasses_have_their_say(x: ShardTensor) -> None:
    assert torch.add(x, torch.zeros(5, 3).as_subclass(_Foreign)) == "foreign"


# -- kernels ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("nvdd_test::twice", mutates_args=())
def _twice(t: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    for each in (t, *others):
        if type(each) is not torch.Tensor:
            raise TypeError(f"a kernel was handed a {type(each).__name__}")
    return 2.0 * t


def _twice_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0])


def _twice_backward(ctx, grad):  # type: ignore[no-untyped-def]
    if type(ctx.saved_tensors[0]) is not torch.Tensor:
        raise TypeError("a kernel's backward was handed a ShardTensor")
    return 2.0 * grad, [None]


_twice.register_autograd(_twice_backward, setup_context=_twice_setup)


def test_kernels_are_handed_plain_tensors() -> None:
    t = random(5, 3).requires_grad_()
    x = rows(t, single(5))
    y = torch.ops.nvdd_test.twice(x, [x])
    assert type(y) is torch.Tensor
    assert torch.equal(torch.autograd.grad(y.sum(), t)[0], torch.full_like(t, 2.0))
    assert torch.equal(torch.ops.nvdd_test.twice.default(x, [x]), _twice(x, [x]))


# -- copies and pickles ---------------------------------------------------------------------------------------------


def test_deepcopy_owns_its_rows(x: ShardTensor) -> None:
    x.requires_grad_()
    (x * x).sum().backward()
    y = copy.deepcopy({"a": x, "b": x})
    assert y["a"] is y["b"]
    assert y["a"].data_ptr() != x.data_ptr()
    assert torch.equal(y["a"], x)
    assert y["a"].requires_grad
    assert torch.equal(y["a"].grad, x.grad)  # type: ignore[arg-type]


def test_copies_inside_a_graph_are_refused(x: ShardTensor) -> None:
    y = x.requires_grad_().clone()
    with pytest.raises(RuntimeError, match=r"deep-copied.*x\.detach\(\)"):
        copy.deepcopy(y)
    with pytest.raises(RuntimeError, match=r"pickled.*x\.detach\(\)"):
        pickle.dumps(y)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickles_keep_rows_and_alignment(x: ShardTensor, how: str) -> None:
    x.requires_grad_()
    pair = {"x": x, "z": torch.zeros_like(x)}
    if how == "pickle":
        back = pickle.loads(pickle.dumps(pair))
    else:
        stream = io.BytesIO()
        torch.save(pair, stream)
        stream.seek(0)
        back = torch.load(stream, weights_only=False)
    assert torch.equal(back["x"], x)
    assert back["x"].requires_grad
    assert back["x"]._meta is back["z"]._meta
    assert type(back["x"] + back["z"]) is torch.Tensor


@pytest.mark.parametrize("storage", ["halo", "sharded", "none"])
def test_files_can_be_read_without_trust(storage: str) -> None:
    t = random(5, 3)
    x = {
        "halo": lambda: rows(t, single(5), SPEC_MPNN_HALO),  # type: ignore[arg-type]
        "sharded": lambda: ShardTensor.wrap(
            t,
            spec=Rules(storage=StorageKind.SHARDED),
            gather_meta=GatherMetadata.build(Mesh.single(), torch.arange(5)),
        ),
        "none": lambda: ShardTensor.wrap(t, spec=None),
    }[storage]()
    stream = io.BytesIO()
    torch.save({"x": x}, stream)
    stream.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        torch.load(stream, weights_only=True)
    stream.seek(0)
    with torch.serialization.safe_globals(safe_globals(x._spec)):
        back = torch.load(stream, weights_only=True)["x"]
    assert type(back) is ShardTensor
    assert (back._spec, back._kind) == (x._spec, x._kind)
    assert torch.equal(back.to_local(), t)
    assert torch.equal(x + back, 2.0 * t)


def test_pickle_of_a_rank_of_many_needs_a_mesh() -> None:
    place = MeshPlace(rank=1, size=4, device="cpu")
    with pytest.raises(DistributedError, match=r"rank 1 of 4 .*loading_onto\(mesh\)"):
        place.mesh()
    with loading_onto(Mesh.single()), pytest.raises(DistributedError, match="read on rank 0 of 1"):
        place.mesh()
    mesh = Mesh.single()
    with loading_onto(mesh):
        assert MeshPlace(0, 1, "cpu").mesh() is mesh
        back = pickle.loads(pickle.dumps(rows(random(2, 3), single(2))))
    assert back._meta.plan.mesh is mesh
    assert back._config.mesh is mesh
