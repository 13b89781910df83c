"""Transforms in place against torch's, and the mesh whose transforms ranks share."""

from __future__ import annotations

import mesh_ranks as on_rank
import pytest
import torch
from mesh_ranks import Case

from nvdd_pme.cpu_mesh import MeshWork
from nvdd_pme.fourier_kernels import convolve_columns, invert_rows
from nvdd_pme.reciprocal import mesh_potential

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 20, 26, 30, 49, 64, 75, 80, 97)


def random_waves(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("n", LENGTHS)
def test_convolve_columns(n: int, width: int) -> None:
    before, part = random_waves(n, 4, width), slice(1, 3)
    influence, squares = before.imag.exp(), torch.zeros(before.shape, dtype=torch.float64)
    wave = before.clone()
    convolve_columns(wave, influence.contiguous(), part, squares)
    there = torch.fft.fft(before, dim=0)[:, part]
    expected, squared = before.clone(), torch.zeros_like(squares)
    expected[:, part] = torch.fft.ifft(influence[:, part] * there, dim=0, norm="forward")
    squared[:, part] = there.abs().square()
    torch.testing.assert_close(wave, expected, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(squares, squared, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("n", LENGTHS)
def test_invert_rows(n: int, width: int) -> None:
    before, part = random_waves(4, n, width), slice(1, 3)
    wave, expected = before.clone(), before.clone()
    invert_rows(wave, part)
    expected[part] = torch.fft.ifft(before[part], dim=1, norm="forward")
    torch.testing.assert_close(wave, expected, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("mesh", [(6, 5, 4), (4, 3, 7), (1, 1, 1)])
def test_one_rank_against_torch(mesh: tuple[int, int, int]) -> None:
    charge = random_waves(*mesh).real.contiguous()
    wave = torch.fft.rfftn(charge)
    g = random_waves(*wave.shape).imag.contiguous()
    expected = 0.5 * mesh_potential(charge, g)
    work = MeshWork.alone(charge.clone())
    energy, squared = work.solve(g, squares=True)
    torch.testing.assert_close(work.field, expected)
    torch.testing.assert_close(energy, (charge * expected).sum())
    torch.testing.assert_close((g * squared).sum(), energy)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("case", [Case((6, 5, 8)), Case((2, 5, 4), owners="last has none")], ids=str)
def test_gradients_after_the_next_evaluation(rank_pool, world: int, case: Case) -> None:
    assert rank_pool(world).run(on_rank.late_gradients, case) == [[0.0, 0.0]] * world
