"""Products and contractions done differently: e3nn's and mace's numbers, with every derivative that is asked for."""

from __future__ import annotations

import pytest
import torch
from mace.modules.symmetric_contraction import SymmetricContraction

from nvdd_mace import contraction
from nvdd_mace.channelwise import AsItIs, Channelwise, product_of_edges
from nvdd_mace.conformance import INTERACTIONS, random_module
from nvdd_mace.contraction import Contraction, serves_contraction
from nvdd_mace.foreign import built_in, o3

SHAPES = {
    "scalars": {"hidden": "4x0e"},
    "vectors": {},
    "wide": {"hidden": "16x0e+16x1o+16x2e", "max_ell": 3},
    "uneven": {"hidden": "8x0e+4x1o"},
    "linear": {"correlation": 1},
    "quartic": {"correlation": 4, "max_ell": 1},
}


def derivatives(function, given, parameters=()):
    """Return outputs, gradients of a weighted sum, and second derivatives of the gradients' squares."""
    given = [t.clone().requires_grad_(True) for t in given]
    out = function(*given)
    slope = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view(out.shape)
    first = torch.autograd.grad((out * slope).sum(), given, create_graph=True)
    targets = [*given, *parameters]
    if not any(g.requires_grad for g in first):
        return [out, *first]
    second = torch.autograd.grad(sum(g.square().sum() for g in first), targets, allow_unused=True)
    return [
        out,
        *first,
        *(torch.zeros_like(t) if g is None else g for g, t in zip(second, targets, strict=True)),
    ]


def same(found, right):
    for one, other in zip(found, right, strict=True):
        scale = max(1.0, float(other.detach().abs().max())) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13 * scale)


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_models_of_mace(interaction, shape):
    module = random_module(interaction, dtype=torch.float64, **SHAPES[shape])
    for block in module.interactions:
        tensors = block.conv_tp
        quick = product_of_edges(tensors)
        assert isinstance(quick, Channelwise)
        for n in (0, 1, 9):
            widths = (tensors.irreps_in1.dim, tensors.irreps_in2.dim, tensors.weight_numel)
            given = [random(n, width, seed=at) for at, width in enumerate(widths)]

            def ours(rows, attributes, weights, quick=quick):
                return quick.put_back(quick.messages(quick.laid_out(rows), attributes, weights))

            same(derivatives(ours, given), derivatives(tensors, given))
    for block in module.products:
        right = block.symmetric_contractions
        parts = right.contractions
        parameters = [p.requires_grad_(True) for p in right.parameters() if p.requires_grad]
        attributes = torch.eye(len(parts[0].weights_max), dtype=torch.float64)[[0, -1, 0, -1, 0]]
        rows = random(5, parts[0].num_features, parts[0].U_tensors(1).shape[-2])
        found = derivatives(lambda x, r=right, y=attributes: Contraction(r)(x, y), [rows], parameters)
        same(found, derivatives(lambda x, r=right, y=attributes: r(x, y), [rows], parameters))


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_blocks_of_rows(monkeypatch, rows):
    right = random_module(dtype=torch.float64).products[0].symmetric_contractions
    part = right.contractions[0]
    found = Contraction(right)
    of_row = sum(len(one) for one in found._monomials) * part.num_features * 8
    attributes = torch.eye(len(part.weights_max), dtype=torch.float64)[[0, 1] * 4][:rows]
    given = [random(rows, part.num_features, part.U_tensors(1).shape[-2])]
    expected = derivatives(lambda x: right(x, attributes), given)
    for size in (1, 2, 3, 100):
        monkeypatch.setattr(contraction, "_BYTES", size * of_row)
        same(derivatives(lambda x: found(x, attributes), given), expected)
    with torch.no_grad():
        torch.testing.assert_close(found(given[0], attributes), expected[0], rtol=1e-12, atol=1e-12)


def test_monomials_are_not_kept():
    module = random_module(dtype=torch.float64, correlation=3).products[0].symmetric_contractions
    attributes = torch.eye(len(module.contractions[0].weights_max), dtype=torch.float64)[[0] * 50]
    rows = random(50, module.contractions[0].num_features, module.contractions[0].U_tensors(1).shape[-2])
    kept = []
    for each in (module, Contraction(module)):
        kept.append(0)

        def pack(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            each(rows.requires_grad_(True), attributes)
    assert kept[0] > 20 * rows.numel()
    assert kept[1] < 2 * rows.numel()


def test_outputs_that_no_product_reaches():
    """U is all zeros for some degrees; no row at all."""
    with built_in(torch.float64):
        right = SymmetricContraction("3x0e+3x1o", "3x0e+3x1e+3x0o", 2, num_elements=2)
    attributes = torch.eye(2, dtype=torch.float64)[[0, 1, 1]]
    rows = random(3, 3, 4)
    same(
        derivatives(lambda x: Contraction(right)(x, attributes), [rows]),
        derivatives(lambda x: right(x, attributes), [rows]),
    )
    assert Contraction(right)(rows[:0], attributes[:0]).shape == (0, right(rows, attributes).shape[1])


def test_most_of_a_contraction_is_left_out():
    with built_in(torch.float64):
        right = SymmetricContraction("1x0e+1x1o+1x2e+1x3o", "1x0e+1x1o", 3, num_elements=1)
    assert [len(one) for one in Contraction(right)._monomials] == [16, 124, 367]


@pytest.mark.parametrize(
    ("first", "second", "out", "paths"),
    [
        ("2x0e+2x1o", "1x0e", "2x1o+2x0e", [(0, 0, 1, "uvu", True), (1, 0, 0, "uvu", True)]),  # in no order
        ("2x0e", "1x0e", "3x0e", [(0, 0, 0, "uvw", True)]),
        ("2x0e", "2x0e", "2x0e", [(0, 0, 0, "uvu", True)]),
        ("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvu", False)]),
        ("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvu", True), (0, 0, 0, "uvu", True)]),
    ],
)
def test_other_products_are_asked_as_they_are(first, second, out, paths):
    with built_in(torch.float64):
        module = o3.TensorProduct(first, second, out, paths, shared_weights=False, internal_weights=False)
    quick = product_of_edges(module)
    assert isinstance(quick, AsItIs)
    given = [
        random(4, width) for width in (module.irreps_in1.dim, module.irreps_in2.dim, module.weight_numel)
    ]
    found = quick.put_back(quick.messages(quick.laid_out(given[0]), *given[1:]))
    torch.testing.assert_close(found, module(*given))


def test_other_modules_are_none():
    assert not serves_contraction(None)
    assert not serves_contraction(torch.nn.Linear(1, 1))
    assert isinstance(product_of_edges(torch.nn.Linear(1, 1)), AsItIs)
