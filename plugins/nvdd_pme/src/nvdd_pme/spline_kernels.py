"""Kernels that spread points onto a mesh and read a mesh at points, for CPU and GPU.

Key objects: `spread_kernel`, `gather_kernel`, compiled for an order and a set of derivatives. One snippet serves both
devices: one point a call, weights by the recursion of cardinal splines, in place. Layer: plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import warp as wp

from nvdd_pme.start import array, typed

_WEIGHTS = r"""
constexpr int ORDER = @ORDER@, SETS = @SETS@, MOST = @MOST@;
constexpr int set[SETS][3] = { @LIST@ };
const int size[3] = { size0, size1, size2 };
double w[3][MOST + 1][ORDER];  // by axis, derivative, place in ascending order
int at[3][ORDER];
for (int axis = 0; axis < 3; axis++) {
    const double u = points.data[3 * (size_t)n + axis];
    const double whole = floor(u);
    const double f = u - whole;
    long long first = ((long long)whole - (ORDER - 1)) % size[axis];
    if (first < 0) first += size[axis];
    for (int j = 0; j < ORDER; j++) {
        at[axis][j] = (int)first;
        if (++first == size[axis]) first = 0;
    }
    for (int d = 0; d <= MOST; d++) {
        double v[ORDER];
        v[0] = 1.0;
        for (int p = 2; p <= ORDER - d; p++) {
            const double part = 1.0 / (p - 1);
            v[p - 1] = (p - f - (p - 1)) * v[p - 2] * part;
            for (int j = p - 2; j > 0; j--) v[j] = ((f + j) * v[j] + (p - f - j) * v[j - 1]) * part;
            v[0] = f * v[0] * part;
        }
        for (int p = ORDER - d + 1; p <= ORDER; p++) {
            v[p - 1] = -v[p - 2];
            for (int j = p - 2; j > 0; j--) v[j] = v[j] - v[j - 1];
        }
        for (int j = 0; j < ORDER; j++) w[axis][d][j] = v[ORDER - 1 - j];
    }
}
"""

_SPREAD = (
    _WEIGHTS
    + r"""
double value[SETS];
for (int k = 0; k < SETS; k++) value[k] = values.data[SETS * (size_t)n + k];
for (int a = 0; a < ORDER; a++) for (int b = 0; b < ORDER; b++) {
    double* row = grid.data + ((size_t)at[0][a] * size[1] + at[1][b]) * size[2];
    double sums[ORDER];
    for (int c = 0; c < ORDER; c++) sums[c] = 0.0;
    for (int k = 0; k < SETS; k++) {
        const double plane = value[k] * w[0][set[k][0]][a] * w[1][set[k][1]][b];
        for (int c = 0; c < ORDER; c++) sums[c] += plane * w[2][set[k][2]][c];
    }
    for (int c = 0; c < ORDER; c++) {
#ifdef __CUDA_ARCH__
        atomicAdd(row + at[2][c], sums[c]);
#else
        row[at[2][c]] += sums[c];
#endif
    }
}
"""
)

_GATHER = (
    _WEIGHTS
    + r"""
double value[SETS];
for (int k = 0; k < SETS; k++) value[k] = 0.0;
for (int a = 0; a < ORDER; a++) for (int b = 0; b < ORDER; b++) {
    const double* row = grid.data + ((size_t)at[0][a] * size[1] + at[1][b]) * size[2];
    double read[ORDER];
    for (int c = 0; c < ORDER; c++) read[c] = row[at[2][c]];
    for (int k = 0; k < SETS; k++) {
        double sum = 0.0;
        for (int c = 0; c < ORDER; c++) sum += w[2][set[k][2]][c] * read[c];
        value[k] += w[0][set[k][0]][a] * w[1][set[k][1]][b] * sum;
    }
}
for (int k = 0; k < SETS; k++) values.data[SETS * (size_t)n + k] = value[k];
"""
)


@cache
def spread_kernel(order: int, derivatives: tuple[int, ...]) -> Any:
    """Return the kernel (points, values, grid, sizes) that adds to a grid; three derivatives a set."""
    return _kernel(_SPREAD, order, derivatives)


@cache
def gather_kernel(order: int, derivatives: tuple[int, ...]) -> Any:
    """Return the kernel (points, values, grid, sizes) that writes values."""
    return _kernel(_GATHER, order, derivatives)


def _kernel(text: str, order: int, derivatives: tuple[int, ...]) -> Any:
    sets = [derivatives[k : k + 3] for k in range(0, len(derivatives), 3)]
    listed = ", ".join("{" + ", ".join(map(str, one)) + "}" for one in sets)
    for name, value in {"ORDER": order, "SETS": len(sets), "MOST": max(derivatives), "LIST": listed}.items():
        text = text.replace(f"@{name}@", str(value))
    reals, integer = array(wp.float64), wp.int32
    types = {"points": reals, "values": reals, "grid": reals}
    types |= {"size0": integer, "size1": integer, "size2": integer}

    def one_point(
        points: Any, values: Any, grid: Any, size0: Any, size1: Any, size2: Any, n: Any
    ) -> None: ...

    native = wp.func_native(text)(typed(one_point, {**types, "n": integer}))

    def nvdd_pme_splines(points: Any, values: Any, grid: Any, size0: Any, size1: Any, size2: Any) -> None:
        native(points, values, grid, size0, size1, size2, wp.tid())

    return wp.kernel(typed(nvdd_pme_splines, types), enable_backward=False, module="unique")
