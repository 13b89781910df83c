"""Fourier transforms along one axis of a complex mesh, in place, on a CPU.

Key objects: `convolve_columns`, `invert_rows`. torch transforms an axis that is not the last one into a transposed
copy; to bring that back takes as long as the transform. Here four neighbouring numbers of the last axis are one vector,
and a line of vectors is transformed in the core's nearest cache. Layer: plugin.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import warp as wp

from nvdd_pme.start import array, launch, typed

# Stockham's transform: a stage splits a factor p off the length and leaves the numbers in the order that the next one
# reads. It is written out for the factors that `nvdd_pme.parameters.smooth` leaves.
_TRANSFORM = r"""
typedef double V __attribute__((vector_size(64), aligned(16), may_alias));  // four complex numbers
auto turned = [](V v, double c, double s) {  // times c + i s
    const V t = {-s, s, -s, s, -s, s, -s, s};
    return c * v + t * __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
};
const double* __restrict wave = waves.data;
V* a = (V*)work.data;
V* b = a + n;
auto transform = [&](double sign) {  // of exp(sign i ...)
    int rest = n, done = 1;
    for (int f = 0; rest > 1; f++) {
        const int p = factors.data[f], step = n / rest, part = n / p;
        rest /= p;
        const int from = done * rest;  // distance of what belongs together
        for (int q = 0; q < rest; q++) for (int j = 0; j < done; j++) {
            const V* __restrict x = a + done * q + j;
            V* __restrict y = b + done * p * q + j;
            auto put = [&](int k, V v) {
                const int at = 2 * q * k * step;
                y[k * done] = turned(v, wave[at], sign * wave[at + 1]);
            };
            if (p == 4) {
                const V s = x[0] + x[2 * from], d = x[0] - x[2 * from];
                const V t = x[from] + x[3 * from], e = turned(x[from] - x[3 * from], 0.0, sign);
                y[0] = s + t;
                put(1, d + e);
                put(2, s - t);
                put(3, d - e);
            } else if (p == 5) {
                constexpr double c1 = 0.30901699437494742410, c2 = -0.80901699437494742410;
                constexpr double s1 = 0.95105651629515357212, s2 = 0.58778525229247312917;
                const V s = x[from] + x[4 * from], t = x[2 * from] + x[3 * from];
                const V d = x[from] - x[4 * from], e = x[2 * from] - x[3 * from];
                const V u = x[0] + c1 * s + c2 * t, v = x[0] + c2 * s + c1 * t;
                const V i = turned(s1 * d + s2 * e, 0.0, sign), k = turned(s2 * d - s1 * e, 0.0, sign);
                y[0] = x[0] + s + t;
                put(1, u + i);
                put(2, v + k);
                put(3, v - k);
                put(4, u - i);
            } else if (p == 3) {
                const V s = x[from] + x[2 * from], u = x[0] - 0.5 * s;
                const V i = turned(0.86602540378443864676 * (x[from] - x[2 * from]), 0.0, sign);
                y[0] = x[0] + s;
                put(1, u + i);
                put(2, u - i);
            } else {
                for (int k = 0; k < p; k++) {
                    V sum = x[0];
                    for (int r = 1; r < p; r++) {
                        const int at = 2 * part * (int)((long long)r * k % p);
                        sum += turned(x[r * from], wave[at], sign * wave[at + 1]);
                    }
                    put(k, sum);
                }
            }
        }
        V* other = a; a = b; b = other;
        done *= p;
    }
};
"""

_LINES = r"""
for (int o = 0; o < n_outer; o++) for (int c = 0; c < width; c += 4) {
    const size_t first = start + (size_t)o * outer_stride + c;
    const int filled = width - c < 4 ? width - c : 4;
    for (int x = 0; x < n; x++) {
        const double* from = mesh.data + 2 * (first + (size_t)x * stride);
        __builtin_prefetch(from + 16);  // the vector after the next one
        V v = {};
        if (filled == 4) v = *(const V*)from;
        else for (int k = 0; k < 2 * filled; k++) v[k] = from[k];
        a[x] = v;
    }
    if (convolves) {
        transform(-1.0);
        for (int x = 0; x < n; x++) {
            const size_t at = first + (size_t)x * stride;
            V g = {};
            for (int k = 0; k < filled; k++) g[2 * k] = g[2 * k + 1] = influence.data[at + k];
            const V v = a[x], square = v * v;
            if (wants_squares) for (int k = 0; k < filled; k++)
                squares.data[at + k] = square[2 * k] + square[2 * k + 1];
            a[x] = g * v;
        }
    }
    transform(1.0);
    for (int x = 0; x < n; x++) {
        double* to = mesh.data + 2 * (first + (size_t)x * stride);
        if (filled == 4) *(V*)to = a[x];
        else for (int k = 0; k < 2 * filled; k++) to[k] = a[x][k];
    }
}
"""


def convolve_columns(
    wave: torch.Tensor, influence: torch.Tensor, part: slice, squares: torch.Tensor | None = None
) -> None:
    """Transform ``wave[:, part]`` along the first axis, multiply it by the influence, and transform it back.

    Parameters
    ----------
    wave : Tensor, shape (K0, K1, H), complex128
        Overwritten; inverse transforms are not divided by their length.
    influence : Tensor, shape (K0, K1, H), float64
    part : slice
        With a start and a stop.
    squares : Tensor, shape (K0, K1, H), float64, optional
        Gets in `part` the squared absolute values before they are multiplied.
    """
    k0, k1, h = wave.shape
    lines = (k1 * h, part.start * h, 1, 0, (part.stop - part.start) * h)
    _run(wave, influence, squares, k0, lines, convolves=1)


def invert_rows(wave: torch.Tensor, part: slice) -> None:
    """Transform ``wave[part]`` (K0, K1, H), complex128, back along the second axis; it is not divided by its length."""
    _, k1, h = wave.shape
    lines = (h, part.start * k1 * h, part.stop - part.start, k1 * h, h)
    _run(wave, None, None, k1, lines, convolves=0)


def _run(
    wave: torch.Tensor,
    influence: torch.Tensor | None,
    squares: torch.Tensor | None,
    n: int,
    lines: tuple[int, int, int, int, int],
    convolves: int,
) -> None:
    mesh = torch.view_as_real(wave)
    waves, factors = _plan(n)
    given = (mesh if influence is None else influence, mesh if squares is None else squares)
    work = waves.new_empty((2, n, 8))
    launch(_kernel(), 1, (mesh, *given, waves, factors, work, n, *lines, convolves, int(squares is not None)))


@cache
def _plan(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each n-th part of a circle (n, 2), and factors of n."""
    angle = (2.0 * math.pi / n) * torch.arange(n, dtype=torch.float64)
    factors, rest = [], n
    for p in (4, *range(2, n + 1)):
        while rest % p == 0:
            factors.append(p)
            rest //= p
    return torch.stack([angle.cos(), angle.sin()], dim=1), torch.tensor(factors, dtype=torch.int32)


@cache
def _kernel() -> Any:
    reals = array(wp.float64)
    types = dict.fromkeys(("mesh", "influence", "squares", "waves"), reals)
    types |= {"factors": array(wp.int32), "work": reals}
    numbers = ("n", "stride", "start", "n_outer", "outer_stride", "width", "convolves", "wants_squares")
    types |= dict.fromkeys(numbers, wp.int32)

    def lines(
        mesh: Any,
        influence: Any,
        squares: Any,
        waves: Any,
        factors: Any,
        work: Any,
        n: Any,
        stride: Any,
        start: Any,
        n_outer: Any,
        outer_stride: Any,
        width: Any,
        convolves: Any,
        wants_squares: Any,
    ) -> None: ...

    native = wp.func_native(_TRANSFORM + _LINES)(typed(lines, types))

    def nvdd_pme_fourier(
        mesh: Any,
        influence: Any,
        squares: Any,
        waves: Any,
        factors: Any,
        work: Any,
        n: Any,
        stride: Any,
        start: Any,
        n_outer: Any,
        outer_stride: Any,
        width: Any,
        convolves: Any,
        wants_squares: Any,
    ) -> None:
        native(
            mesh,
            influence,
            squares,
            waves,
            factors,
            work,
            n,
            stride,
            start,
            n_outer,
            outer_stride,
            width,
            convolves,
            wants_squares,
        )

    return wp.kernel(typed(nvdd_pme_fourier, types), enable_backward=False, module="unique")
