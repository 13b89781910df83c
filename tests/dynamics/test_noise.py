"""The noise is normal, independent of everything but its keys, and frozen."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy import stats

from nvdd_core.dynamics.noise import NoiseBuffers, normal, random_words
from nvdd_core.errors import InputError

N = 200_000
IDS = torch.arange(N)


def _z(values: torch.Tensor, expected: float, variance: float) -> float:
    """Deviation of the mean in standard errors."""
    return float((values.mean() - expected) * math.sqrt(values.numel() / variance))


@pytest.mark.parametrize(
    ("power", "expected", "variance"), [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)]
)
@pytest.mark.parametrize("n_columns", [1, 2, 3])
def test_moments(power: int, expected: float, variance: float, n_columns: int) -> None:
    x = normal(1, 2, IDS, n_columns)
    for column in x.T:
        assert abs(_z(column**power, expected, variance)) < 4.5
    assert x.shape == (N, n_columns)
    assert torch.isfinite(x).all()


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_kolmogorov_smirnov(seed: int) -> None:
    for column in normal(seed, 7, IDS, 3).T:
        assert stats.kstest(column.numpy(), "norm").pvalue > 1e-4


def test_tails_reach_as_far_as_they_should() -> None:
    """Of 3 million numbers the largest is between 4.5 and 6.5 with a probability of all but 1e-5."""
    extreme = max(float(normal(4, k, IDS, 3).abs().max()) for k in range(5))
    assert 4.5 < extreme < 6.5


PAIRS = {
    "columns 0 1": lambda: (normal(1, 2, IDS, 3)[:, 0], normal(1, 2, IDS, 3)[:, 1]),
    "columns 0 2": lambda: (normal(1, 2, IDS, 3)[:, 0], normal(1, 2, IDS, 3)[:, 2]),
    "columns 1 2": lambda: (normal(1, 2, IDS, 3)[:, 1], normal(1, 2, IDS, 3)[:, 2]),
    "ids 1 apart": lambda: (normal(1, 2, IDS, 3), normal(1, 2, IDS + 1, 3)),
    "ids 2 apart": lambda: (normal(1, 2, IDS, 3), normal(1, 2, IDS + 2, 3)),
    "ids 4096 apart": lambda: (normal(1, 2, IDS, 3), normal(1, 2, IDS + 4096, 3)),
    "ids 2**40 apart": lambda: (normal(1, 2, IDS, 3), normal(1, 2, IDS + 2**40, 3)),
    "next step": lambda: (normal(1, 2, IDS, 3), normal(1, 3, IDS, 3)),
    "step 2**32 later": lambda: (normal(1, 2, IDS, 3), normal(1, 2 + 2**32, IDS, 3)),
    "next seed": lambda: (normal(1, 2, IDS, 3), normal(2, 2, IDS, 3)),
    "seed and step swapped": lambda: (normal(1, 2, IDS, 3), normal(2, 1, IDS, 3)),
    "step against id": lambda: (normal(1, 2, IDS, 3), normal(1, 3, IDS - 1, 3)),
    "next stream": lambda: (normal(1, 2, IDS, 3), normal(1, 2, IDS, 3, stream=1)),
    "stream and step swapped": lambda: (normal(1, 0, IDS, 3, stream=1), normal(1, 1, IDS, 3, stream=0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_uncorrelated(name: str) -> None:
    """Neither values nor squares correlate; squares would show a shared Box-Muller radius."""
    a, b = PAIRS[name]()
    assert abs(_z(a * b, 0.0, 1.0)) < 4.5
    assert abs(_z((a * a - 1) * (b * b - 1), 0.0, 4.0)) < 4.5
    assert abs(_z((a * a - 1) * b, 0.0, 2.0)) < 4.5


def test_one_row_over_time_is_white() -> None:
    """What a thermostat sees: one row's numbers from step to step."""
    series = torch.stack([normal(3, step, torch.tensor([5]), 3)[0] for step in range(4000)])
    for lag in (1, 2, 3, 10):
        assert abs(_z(series[lag:] * series[:-lag], 0.0, 1.0)) < 4.5
    assert abs(_z(series**2, 1.0, 2.0)) < 4.5


def test_words_are_balanced_and_distinct() -> None:
    words = torch.cat([random_words(9, step, IDS, 4).flatten() for step in range(3)])
    assert words.unique().numel() == words.numel()
    for bit in range(64):
        ones = float(((words >> bit) & 1).to(torch.float64).mean())
        assert abs(ones - 0.5) < 4.5 * 0.5 / math.sqrt(words.numel())


@pytest.mark.parametrize("what", ["id", "step", "seed"])
def test_avalanche(what: str) -> None:
    """Changing one bit of a key changes half of the bits of the word."""
    base = random_words(123, 456, IDS[:2000], 1)
    for bit in (0, 1, 5, 17, 31, 40, 62):
        flip = 1 << bit
        changed = {
            "id": lambda flip=flip: random_words(123, 456, IDS[:2000] ^ flip, 1),
            "step": lambda flip=flip: random_words(123, 456 ^ flip, IDS[:2000], 1),
            "seed": lambda flip=flip: random_words(123 ^ flip, 456, IDS[:2000], 1),
        }[what]()
        different = base ^ changed
        bits = sum(((different >> k) & 1).to(torch.float64) for k in range(64))
        assert abs(_z(bits, 32.0, 16.0)) < 5.0


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 1001])
def test_any_distribution_of_rows_gives_the_same_bits(n: int) -> None:
    whole = normal(5, 6, IDS[:n], 3)
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    assert torch.equal(normal(5, 6, IDS[shuffled], 3), whole[shuffled])
    for size in (2, 3, 4, 8):
        for rank in range(size):
            rows = slice(rank, n, size)
            assert torch.equal(normal(5, 6, IDS[:n][rows], 3), whole[rows])


def test_shared_buffers_change_nothing() -> None:
    buffers = NoiseBuffers()
    place = normal(5, 6, IDS, 3, buffers=buffers).data_ptr()
    for step, n, n_columns in ((6, N, 3), (7, N, 3), (7, 100, 3), (7, 100, 2), (8, 0, 3), (8, 100, 5)):
        found = normal(5, step, IDS[:n], n_columns, buffers=buffers)
        assert torch.equal(found, normal(5, step, IDS[:n], n_columns))
        assert (found.data_ptr() == place) == (n == N)


def test_columns_do_not_depend_on_how_many_are_asked_for_within_a_pair() -> None:
    assert torch.equal(normal(5, 6, IDS[:50], 3)[:, 2], normal(5, 6, IDS[:50], 4)[:, 2])


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    normal(1, 1, IDS[:10], 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    x = normal(1, 1, torch.arange(shape[0]), shape[1])
    assert tuple(x.shape) == shape
    assert x.dtype == torch.float64


@pytest.mark.parametrize("ids", [torch.arange(3, dtype=torch.int32), torch.zeros((2, 2), dtype=torch.int64)])
def test_wrong_ids(ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"shape \(n,\), int64"):
        normal(1, 1, ids, 3)


def _plain(seed: int, step: int, row: int, n_columns: int, stream: int) -> list[float]:
    """The definition once more, in Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z &= mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    first = mix((mix(mix(seed + golden) ^ (step & mask)) + golden) ^ stream)
    second = mix(first + golden)
    row_word = mix(row * golden + first)
    pairs = (n_columns + 1) // 2
    low = [mix(row_word + second + (c + 1) * golden) % 2**52 for c in range(2 * pairs)]
    out = []
    for radius, angle in zip(low[:pairs], low[pairs:], strict=True):
        r = math.sqrt(-2.0 * math.log((2 * radius + 1) * 2.0**-53))
        phi = 2.0 * math.pi * (angle * 2.0**-52)
        out += [r * math.cos(phi), r * math.sin(phi)]
    return out[:n_columns]


def test_against_the_definition() -> None:
    rows = [0, 1, 2, 31_999, 2**31, 2**40 + 7]
    for seed, step, stream in itertools.product((0, 1, 2**64 - 1), (0, 10**6), (0, 1)):
        found = normal(seed, step, torch.tensor(rows), 3, stream=stream)
        expected = torch.tensor([_plain(seed, step, row, 3, stream) for row in rows], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_frozen() -> None:
    """Changing the noise changes every user's trajectories; do it with a new major version only."""
    expected = [
        [
            1.2196114775229063,
            -1.2870222726174074,
            -2.031803095315007,
            0.4128918427687145,
            -0.5970871524097161,
        ],
        [
            -0.44298353127750506,
            1.3702218587659971,
            1.041718861369725,
            -0.45689381297025083,
            0.3868749021133311,
        ],
        [
            -2.4285291188310136,
            -0.42830112669060155,
            0.596224984781136,
            0.44836980440216945,
            -1.804126871746122,
        ],
    ]
    found = normal(2024, 17, torch.tensor([0, 1, 12345678901]), 5)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-15)
