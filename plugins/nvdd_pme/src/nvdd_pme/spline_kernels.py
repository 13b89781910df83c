"""Kernels that spread points onto a mesh and read a mesh at points, for CPU and GPU.

Key objects: `spread_kernel`, `spread_threads`, `gather_kernel`, compiled for an order and a set of derivatives. One
snippet serves both devices: one point a call, weights by the recursion of cardinal splines, in place. Layer: plugin.
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
double f[4];  // the fourth lane is idle
f[3] = 0.0;
for (int axis = 0; axis < 3; axis++) {
    const double u = points.data[3 * (size_t)n + axis];
    const double whole = floor(u);
    f[axis] = u - whole;
    long long first = ((long long)whole - (ORDER - 1)) % size[axis];
    if (first < 0) first += size[axis];
    for (int j = 0; j < ORDER; j++) {
        at[axis][j] = (int)first;
        if (++first == size[axis]) first = 0;
    }
}
double v[ORDER][4];
for (int x = 0; x < 4; x++) v[0][x] = 1.0;
#pragma unroll
for (int p = 1; p <= ORDER; p++) {
    if (p > 1) {  // from order p - 1 to order p
        const double part = 1.0 / (p - 1);
        for (int x = 0; x < 4; x++) v[p - 1][x] = (1.0 - f[x]) * v[p - 2][x] * part;
        #pragma unroll
        for (int j = p - 2; j > 0; j--)
            for (int x = 0; x < 4; x++) v[j][x] = ((f[x] + j) * v[j][x] + (p - f[x] - j) * v[j - 1][x]) * part;
        for (int x = 0; x < 4; x++) v[0][x] = f[x] * v[0][x] * part;
    }
    const int d = ORDER - p;
    if (d <= MOST) {  // the d-th difference of order p is the d-th derivative
        double t[ORDER][4];
        for (int j = 0; j < p; j++) for (int x = 0; x < 4; x++) t[j][x] = v[j][x];
        for (int q = p + 1; q <= ORDER; q++) {
            for (int x = 0; x < 4; x++) t[q - 1][x] = -t[q - 2][x];
            for (int j = q - 2; j > 0; j--) for (int x = 0; x < 4; x++) t[j][x] -= t[j - 1][x];
        }
        for (int j = 0; j < ORDER; j++) for (int axis = 0; axis < 3; axis++) w[axis][d][j] = t[ORDER - 1 - j][axis];
    }
}
"""

# On a GPU eight threads share a point, one for each mesh point along the last axis, whose additions then go together.
_LANES = r"""
#ifdef __CUDA_ARCH__
const int lane = n % 8;
n /= 8;
#endif
"""

# On a CPU, where the last axis doesn't wrap within reach, eight neighbouring mesh points are one vector.
_LINES = r"""
#ifndef __CUDA_ARCH__
typedef double V __attribute__((vector_size(64), aligned(8), may_alias));
const bool straight = at[2][0] + 8 <= size[2];
V line[MOST + 1];
for (int d = 0; d <= MOST; d++) {
    line[d] = V{};
    for (int c = 0; c < ORDER; c++) line[d][c] = w[2][d][c];
}
#endif
"""

_SPREAD = (
    _LANES
    + _WEIGHTS
    + _LINES
    + r"""
double value[SETS];
for (int k = 0; k < SETS; k++) value[k] = values.data[SETS * (size_t)n + k];
#ifdef __CUDA_ARCH__
if (lane >= ORDER) return;
double line[MOST + 1];
int place = 0;
#pragma unroll
for (int c = 0; c < ORDER; c++) if (c == lane) {
    place = at[2][c];
    for (int d = 0; d <= MOST; d++) line[d] = w[2][d][c];
}
#endif
for (int a = 0; a < ORDER; a++) for (int b = 0; b < ORDER; b++) {
    double* row = grid.data + ((size_t)at[0][a] * size[1] + at[1][b]) * size[2];
    double part[MOST + 1];  // by derivative along the last axis
    for (int d = 0; d <= MOST; d++) part[d] = 0.0;
    for (int k = 0; k < SETS; k++) part[set[k][2]] += value[k] * w[0][set[k][0]][a] * w[1][set[k][1]][b];
#ifndef __CUDA_ARCH__
    if (straight) {
        V* to = (V*)(row + at[2][0]);
        V sum = *to;
        for (int d = 0; d <= MOST; d++) sum += part[d] * line[d];
        *to = sum;
        continue;
    }
    for (int c = 0; c < ORDER; c++) {
        double sum = 0.0;
        for (int d = 0; d <= MOST; d++) sum += part[d] * w[2][d][c];
        row[at[2][c]] += sum;
    }
#else
    double sum = 0.0;
    for (int d = 0; d <= MOST; d++) sum += part[d] * line[d];
    atomicAdd(row + place, sum);
#endif
}
"""
)

_GATHER = (
    _WEIGHTS
    + _LINES
    + r"""
double value[SETS];
for (int k = 0; k < SETS; k++) value[k] = 0.0;
for (int a = 0; a < ORDER; a++) {
    // by derivative along the middle and the last axis, summed over both
    double plane[MOST + 1][MOST + 1];
    for (int e = 0; e <= MOST; e++) for (int d = 0; d <= MOST; d++) plane[e][d] = 0.0;
    const double* rows = grid.data + (size_t)at[0][a] * size[1] * size[2];
#ifndef __CUDA_ARCH__
    if (straight) {
        V sums[MOST + 1];
        for (int e = 0; e <= MOST; e++) sums[e] = V{};
        for (int b = 0; b < ORDER; b++) {
            const V read = *(const V*)(rows + (size_t)at[1][b] * size[2] + at[2][0]);
            for (int e = 0; e <= MOST; e++) sums[e] += w[1][e][b] * read;
        }
        for (int e = 0; e <= MOST; e++) for (int d = 0; d <= MOST; d++) {
            const V t = sums[e] * line[d];
            plane[e][d] = ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]));
        }
    } else
#endif
    for (int b = 0; b < ORDER; b++) {
        const double* row = rows + (size_t)at[1][b] * size[2];
        double part[MOST + 1];
        for (int d = 0; d <= MOST; d++) part[d] = 0.0;
        for (int c = 0; c < ORDER; c++) {
            const double read = row[at[2][c]];
            for (int d = 0; d <= MOST; d++) part[d] += w[2][d][c] * read;
        }
        for (int e = 0; e <= MOST; e++) for (int d = 0; d <= MOST; d++) plane[e][d] += w[1][e][b] * part[d];
    }
    for (int k = 0; k < SETS; k++) value[k] += w[0][set[k][0]][a] * plane[set[k][1]][set[k][2]];
}
for (int k = 0; k < SETS; k++) values.data[SETS * (size_t)n + k] = value[k];
"""
)


def spread_threads(n_points: int, on_gpu: bool) -> int:
    """Return how many threads `spread_kernel` wants."""
    return 8 * n_points if on_gpu else n_points


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
