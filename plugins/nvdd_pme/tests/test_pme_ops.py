"""The operators: values against plain torch, derivatives of both orders, torch's own checks of operators."""

from __future__ import annotations

import pme_kit as kit
import pytest
import torch
import warp as wp
from torch.autograd import gradcheck, gradgradcheck

from nvdd_pme.influence import half_frequencies, influence
from nvdd_pme.modes import influence_slope
from nvdd_pme.pair_kernels import _GPU, _kernel, pair_sums
from nvdd_pme.real_space import _pair_energy, _pair_potential, _sums
from nvdd_pme.reciprocal import ReplicatedMesh, mesh_potential
from nvdd_pme.spline_kernels import gather_kernel, spread_kernel
from nvdd_pme.splines import VALUE, _gather, _spread, gather, spline_weights, spread
from nvdd_pme.start import launch
from nvdd_pme.waves import WaveSum, half_space, wave_sums, wave_values

CELL = torch.tensor(kit.SKEWED_CELL)
MESH = (6, 8, 5)


def random(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def places(n=5):
    """In mesh units, also outside the cell and at a mesh point."""
    u = 20.0 * random(n, 3) - 7.0
    u[0] = torch.tensor([2.0, -3.0, 0.0])
    return u


@pytest.mark.parametrize("order", [2, 3, 4, 5, 6, 7, 8])
def test_spline_weights(order):
    f = random(7, seed=1)
    weights = spline_weights(f, order)
    places_of_weights = torch.arange(order, dtype=torch.float64) + f[:, None]
    ones = torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(weights.sum(1), ones)
    torch.testing.assert_close((weights * places_of_weights).sum(1), ones * order / 2)
    step = 1e-5
    slope = (spline_weights(f + step, order) - spline_weights(f - step, order)) / (2 * step)
    torch.testing.assert_close(spline_weights(f, order, 1), slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("order", [4, 5, 8])
@pytest.mark.parametrize("mesh", [(6, 8, 5), (9, 5, 20)])
def test_spread_is_what_it_says(order, mesh):
    """Against weights multiplied out, on a mesh that a point may reach around and on one with room."""
    u, q = places(), random(5, seed=2) - 0.5
    base = u.floor()
    weights = [spline_weights((u - base)[:, axis], order) for axis in range(3)]
    expected = torch.zeros(mesh, dtype=torch.float64)
    for i in range(5):
        for a in range(order):
            for b in range(order):
                for c in range(order):
                    at = [(int(base[i, k]) - s) % mesh[k] for k, s in enumerate((a, b, c))]
                    expected[tuple(at)] += q[i] * weights[0][i, a] * weights[1][i, b] * weights[2][i, c]
    torch.testing.assert_close(spread(u, q, mesh, order), expected, rtol=0, atol=1e-15)
    grid = random(*mesh, seed=3)
    torch.testing.assert_close(
        (gather(u, grid, order) * q).sum(), (grid * expected).sum(), rtol=1e-13, atol=1e-14
    )


def test_splines_have_derivatives():
    u, q, grid = places().requires_grad_(), random(5).requires_grad_(), random(*MESH).requires_grad_()
    for order in (5, 6):
        assert gradcheck(lambda u, q, o=order: spread(u, q, MESH, o), (u, q))
        assert gradgradcheck(lambda u, q, o=order: spread(u, q, MESH, o), (u, q))
        assert gradcheck(lambda u, g, o=order: gather(u, g, o), (u, grid))
        assert gradgradcheck(lambda u, g, o=order: gather(u, g, o), (u, grid))


@pytest.mark.parametrize("potential", [False, True])
@pytest.mark.parametrize("engine", ["mesh", "waves"])
def test_engines_have_derivatives(engine, potential):
    x, q, cell = (
        (6 * random(4, 3)).requires_grad_(),
        random(4).requires_grad_(),
        CELL.clone().requires_grad_(),
    )

    def energy(x, q, cell):
        if engine == "mesh":
            return ReplicatedMesh()(x, q, cell, alpha=0.6, mesh=MESH, order=5, potential=potential)
        return WaveSum()(x, q, cell, alpha=0.6, reach=(2, 2, 2), k_cutoff=2.0, potential=potential)

    assert gradcheck(energy, (x, q, cell))
    assert gradgradcheck(energy, (x, q, cell))


@pytest.mark.parametrize("mesh", [(6, 8, 5), (5, 9, 8)])
def test_influence_of_the_mesh_is_symmetric(mesh):
    """A wave and its negative weigh alike, also at Nyquist frequencies, so the potential is the energy's gradient."""
    g = influence(CELL, half_frequencies(mesh), alpha=0.6, mesh=mesh, order=6)
    charge = random(*mesh, seed=5).requires_grad_()
    full = influence(
        CELL,
        tuple(torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in mesh),
        alpha=0.6,
        mesh=mesh,
        order=6,
    )
    (slope,) = torch.autograd.grad((full * torch.fft.fftn(charge).abs().square()).sum(), charge)
    torch.testing.assert_close(mesh_potential(charge.detach(), g), slope)


@pytest.mark.parametrize("mesh", [(6, 8, 5), (5, 9, 8), (1, 2, 3)])
def test_slope_of_the_influence(mesh):
    """One pass gives what torch's derivative of the formula does, and what derivatives of it are made of."""
    cell = CELL.clone().requires_grad_()
    g = influence(cell, half_frequencies(mesh), alpha=0.6, mesh=mesh, order=6)
    weights = random(*g.shape, seed=5) - 0.5
    (slope,) = torch.autograd.grad(g, cell, weights)
    found = influence_slope(weights, g.detach(), CELL, 0.6, 6, list(mesh))
    torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-14)

    engine, (x, q) = ReplicatedMesh(), (places(), random(5, seed=2) - 0.5)
    assert gradgradcheck(lambda h: engine(x, q, h, alpha=0.6, mesh=mesh, order=6), cell)


def some_pairs(n_owned=3, n=6):
    """Every pair of `n_owned` receivers with other rows, with weights as of a rank with ghosts."""
    senders = torch.tensor([j for i in range(n_owned) for j in range(i + 1, n)], dtype=torch.int32)
    splits = torch.tensor(
        [0, *torch.tensor([n - 1 - i for i in range(n_owned)]).cumsum(0)], dtype=torch.int32
    )
    weight = torch.where(torch.arange(n) < n_owned, 1.0, 0.5).double()
    return splits, senders, weight, 0.7 * weight


@pytest.mark.parametrize(("alpha", "cutoff"), [(0.0, 4.0), (0.4, 4.0), (1.9, 4.0), (0.4, 2.0)])
def test_pair_kernel_is_plain_torch(alpha, cutoff):
    x, q = 3 * random(6, 3), random(6, seed=1) - 0.5
    pairs = some_pairs()
    for found, expected in zip(
        pair_sums(x, q, *pairs, alpha, cutoff), _sums(x, q, pairs, alpha, cutoff), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("alpha", "cutoff"), [(0.4, 4.0), (0.4, 2.0)])
def test_kernel_of_gpus_is_plain_torch(alpha, cutoff):
    """Run on the CPU, one of the eight threads of a receiver after the other."""
    x, q = 3 * random(6, 3), random(6, seed=1) - 0.5
    pairs = some_pairs()
    ends = torch.zeros(6, 4, dtype=torch.float64)
    packed = torch.cat([x, q[:, None]], 1)
    launch(_kernel(_GPU), 8 * 3, (packed, *pairs, ends, 3, alpha, cutoff**2))
    potential, gradient = _sums(x, q, pairs, alpha, cutoff)
    torch.testing.assert_close(ends[:, 3], potential, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(ends[:, :3], gradient, rtol=1e-13, atol=1e-14)


def test_kernels_compile_for_gpus(tmp_path):
    """By Warp's own compiler, which needs no GPU."""
    made = [_kernel(_GPU), spread_kernel(8, VALUE), gather_kernel(8, (*VALUE, 1, 0, 0, 0, 1, 0, 0, 0, 1))]
    for k, kernel in enumerate(made):
        wp.compile_aot_module(kernel.module, arch=90, module_dir=tmp_path / str(k))
        assert list((tmp_path / str(k)).glob("*.cubin"))


def test_erfc_of_the_kernel():
    """Of the polynomial, against torch's, over the whole range."""
    r = torch.linspace(0.01, 8.0, 4001, dtype=torch.float64)
    n = len(r)
    x = torch.zeros(2 * n, 3, dtype=torch.float64)
    x[:, 0] = 100.0 * (torch.arange(2 * n) % n)
    x[n:, 0] += r
    q = torch.ones(2 * n, dtype=torch.float64)
    one = torch.ones(2 * n, dtype=torch.float64)
    lists = torch.arange(n + 1, dtype=torch.int32), torch.arange(n, 2 * n, dtype=torch.int32)
    potential, gradient = pair_sums(x, q, *lists, one, 0 * one, 1.0, 8.0)
    exact = (x[n:, 0] - x[:n, 0])[:-1]
    torch.testing.assert_close(potential[: n - 1], torch.erfc(exact) / exact, rtol=3e-13, atol=0)
    assert bool((gradient[: n - 1, 0] > 0).all())


def test_pairs_have_derivatives():
    x, q = (3 * random(6, 3)).requires_grad_(), (random(6, seed=1) - 0.5).requires_grad_()
    system = torch.tensor([0, 0, 0, 1, 1, 1])
    pairs = some_pairs()

    def energy(x, q):
        return _pair_energy(x, q, system, *some_consistent(pairs), 2, 0.5, 4.0)[0]

    def potential(x, q):
        return _pair_potential(x, q, *pairs, 0.5, 4.0)

    for function in (energy, potential):
        assert gradcheck(function, (x, q))
        assert gradgradcheck(function, (x, q))


def some_consistent(pairs):
    """Weights of `Pairs.for_energy` of a half list, and no pair between two systems."""
    splits, senders, weight, _ = pairs
    keep, counts = [], [0]
    for i in range(3):
        row = senders[splits[i] : splits[i + 1]]
        keep.append(row[row < 3])
        counts.append(counts[-1] + len(keep[-1]))
    return torch.tensor(counts, dtype=torch.int32), torch.cat(keep), weight, weight


def test_waves_are_what_they_say():
    x, q = random(4, 3), random(4, seed=1) - 0.5
    m = half_space(CELL, (2, 2, 2), 2.0)
    assert bool((m[0] == 0).all())
    assert not bool((m[1:, None] == -m[None, 1:]).all(-1).any())  # one of each pair
    phase = 2 * torch.pi * m @ x.T
    found = wave_sums(x, q, m)
    torch.testing.assert_close(found, torch.stack([phase.cos() @ q, phase.sin() @ q], 1))
    torch.testing.assert_close((wave_values(x, found, m) * q).sum(), found.square().sum())


def test_operators_are_well_formed():
    u, q, grid = places(), random(5), random(*MESH)
    derivatives = [0, 0, 0, 1, 0, 0]
    samples = {
        _spread: (u.requires_grad_(), random(5, 2).requires_grad_(), derivatives, list(MESH), 5),
        _gather: (u, grid.requires_grad_(), derivatives, 5),
        _pair_energy: (
            random(6, 3).requires_grad_(), random(6).requires_grad_(), torch.zeros(6, dtype=torch.int64),
            *some_pairs(), 1, 0.5, 4.0,
        ),
        _pair_potential: (random(6, 3).requires_grad_(), random(6).requires_grad_(), *some_pairs(), 0.5, 4.0),
    }  # fmt: skip
    for op, arguments in samples.items():
        torch.library.opcheck(
            op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
        )
    del q
