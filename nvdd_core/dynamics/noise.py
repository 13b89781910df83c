"""Random numbers that belong to rows, not to processes.

`normal` is a pure function of (seed, step, stream, row id, column). A row gets the same numbers on
whichever rank it lives and in whatever order the rows are stored, so a stochastic trajectory doesn't depend
on the number of ranks, and a restart needs no generator state beyond the step.

The bits come from two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014; constants "mix13" of
Stafford) in wrapping int64 arithmetic: one round makes a random word of (key, id), the second one word per
column, under a second key, so that shifted ids under one key can't reproduce another key's words.
Box-Muller turns two words into two normals.

Invariant: no state, no use of torch's or numpy's generators, no host synchronisation.
Layer: dynamics.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from nvdd_core.errors import InputError

STREAM_THERMOSTAT: Final = 0
"""Noise of a thermostat during a run."""
STREAM_VELOCITIES: Final = 1
"""Velocities drawn at the start."""

_MASK64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
_MULTIPLIER_1: Final = 0xBF58_476D_1CE4_E5B9
_MULTIPLIER_2: Final = 0x94D0_49BB_1331_11EB
_MANTISSA: Final = (1 << 52) - 1
_EXPONENT_OF_ONE: Final = 0x3FF << 52
_BELOW_ONE: Final = 1.0 - 2.0**-53


class NoiseBuffers:
    """Memory that calls of `normal` share, for a caller that draws the same number of rows again and again.

    Fresh memory for every draw would cost as much as the draw: its pages come from the kernel each time.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, int, torch.device] | None = None
        self._words = torch.empty(0)
        self._rows = torch.empty(0)
        self._out = torch.empty(0)

    def get(
        self, n_rows: int, n_columns: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return words and scratch (2 p, n), rows (n,), all int64, and the result (n, n_columns), float64."""
        if self._shape != (n_rows, n_columns, device):
            n_words = 2 * ((n_columns + 1) // 2)
            self._words = torch.empty((2, n_words, n_rows), dtype=torch.int64, device=device)
            self._rows = torch.empty((2, n_rows), dtype=torch.int64, device=device)
            self._out = torch.empty((n_rows, n_columns), dtype=torch.float64, device=device)
            self._shape = (n_rows, n_columns, device)
        return self._words[0], self._words[1], self._rows, self._out


def _signed(word: int) -> int:
    """Return the int64 with the bits of the 64-bit `word`."""
    word &= _MASK64
    return word - (1 << 64) if word >> 63 else word


def _mix(word: int) -> int:
    """SplitMix64 finaliser of one Python integer."""
    word &= _MASK64
    word = ((word ^ (word >> 30)) * _MULTIPLIER_1) & _MASK64
    word = ((word ^ (word >> 27)) * _MULTIPLIER_2) & _MASK64
    return word ^ (word >> 31)


def _mix_(words: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """SplitMix64 finaliser of every int64 in place; `scratch` has the same shape."""
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2), (31, None)):
        torch.bitwise_right_shift(words, torch.tensor(shift, device="cpu"), out=scratch)
        scratch.bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts in the sign; a hash needs zeros
        words.bitwise_xor_(scratch)
        if multiplier is not None:
            words.mul_(_signed(multiplier))
    return words


def _keys(seed: int, step: int, stream: int) -> tuple[int, int]:
    """Return two 64-bit keys; distinct (seed, step, stream) give unrelated ones."""
    key = _mix(int(seed) + _GOLDEN)
    key = _mix(key ^ (int(step) & _MASK64))
    key = _mix((key + _GOLDEN) ^ (int(stream) & _MASK64))
    return key, _mix(key + _GOLDEN)


def random_words(seed: int, step: int, ids: torch.Tensor, n_words: int, stream: int = 0) -> torch.Tensor:
    """Return uniformly distributed 64-bit words keyed by (seed, step, stream, id, column).

    Parameters
    ----------
    seed, step, stream : int
        Any integers, taken modulo 2**64; `stream` separates uses that share seed, step and ids.
    ids : Tensor, shape (n,), int64
        Global row ids, in any order.
    n_words : int
        Words per row.

    Returns
    -------
    Tensor, shape (n_words, n), int64
        Words are the slow axis, so each is contiguous.

    Raises
    ------
    InputError
        If `ids` isn't a one-dimensional int64 tensor.
    """
    _check_ids(ids)
    words = ids.new_empty((n_words, ids.shape[0]))
    _fill_words(
        words, torch.empty_like(words), ids.new_empty((2, ids.shape[0])), ids, _keys(seed, step, stream)
    )
    return words


def _check_ids(ids: torch.Tensor) -> None:
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise InputError(
            f"noise is keyed by row ids of shape (n,), int64; found shape {tuple(ids.shape)}, {ids.dtype}"
        )


def _fill_words(
    words: torch.Tensor, scratch: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, keys: tuple[int, int]
) -> None:
    """Write the words of `ids`: one hash per row in `rows`, then one per word."""
    first, second = keys
    torch.mul(ids, _signed(_GOLDEN), out=rows[0]).add_(_signed(first))
    _mix_(rows[0], rows[1])
    for column in range(words.shape[0]):
        torch.add(rows[0], _signed(second + (column + 1) * _GOLDEN), out=words[column])
    _mix_(words, scratch)


def normal(
    seed: int,
    step: int,
    ids: torch.Tensor,
    n_columns: int,
    stream: int = 0,
    *,
    buffers: NoiseBuffers | None = None,
) -> torch.Tensor:
    """Return standard normal numbers keyed by (seed, step, stream, id, column).

    Parameters
    ----------
    seed, step, stream : int
        Any integers, taken modulo 2**64; `stream` separates uses that share seed, step and ids.
    ids : Tensor, shape (n,), int64
        Global row ids, in any order and on any device.
    n_columns : int
        Numbers per row.
    buffers : NoiseBuffers, optional
        Memory to work in; the result then lives there until the next call with the same buffers.

    Returns
    -------
    Tensor, shape (n, n_columns), float64
        Row k depends on ``ids[k]`` only, never on the other rows. On one kind of device equal keys give equal
        bits; between CPU and GPU the last bits may differ, as their logarithm and cosine do.

    Raises
    ------
    InputError
        If `ids` isn't a one-dimensional int64 tensor.
    """
    _check_ids(ids)
    buffers = NoiseBuffers() if buffers is None else buffers
    words, scratch, rows, out = buffers.get(ids.shape[0], n_columns, ids.device)
    _fill_words(words, scratch, rows, ids, _keys(seed, step, stream))
    n_pairs, n_sines = words.shape[0] // 2, n_columns // 2
    # 52 random bits under the exponent of one: a float64 in [1, 2) without a conversion
    uniform = words.bitwise_and_(_MANTISSA).bitwise_or_(_EXPONENT_OF_ONE).view(torch.float64)
    radius = uniform[:n_pairs].sub_(_BELOW_ONE)  # (0, 1), both ends excluded
    radius.log_().mul_(-2.0).sqrt_()
    angle = uniform[n_pairs:].mul_(2.0 * math.pi)
    cosine = torch.cos(angle, out=scratch[:n_pairs].view(torch.float64))
    torch.mul(radius, cosine, out=out.T[0::2])
    torch.mul(radius[:n_sines], angle[:n_sines].sin_(), out=out.T[1::2])
    return out
