"""Kernels of the real-space sum: on a CPU eight pairs at a time, on a GPU eight threads a receiver.

Key object: `pair_sums`. The CPU kernel goes through a receiver's list three times: pairs within the cutoff are
collected, evaluated with the compiler's vector types, and added to both ends; it is sequential, so that needs no atomic
operation. erfc(t) is exp(-t^2) times a polynomial of degree 18 in 1 / (t + 4), right to 1e-15 up to t = 8, where it is
1e-29. Layer: plugin.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import warp as wp

from nvdd_core.errors import InputError
from nvdd_pme.start import array, launch, typed

LARGEST_SPLITTING = 8.0
"""Largest alpha * cutoff; beyond it the real-space part is below rounding anyway."""

# erfc(t) exp(t^2) (1 + t) as a polynomial in z = 2 - 12 / (t + 4), for t from 0 to 8; a Chebyshev interpolation made
# with 40 digits, whose largest relative error, rounding included, is 9e-16.
_ERFC = (
    0.7661870289315172,
    -0.1949811277498897,
    0.07001559973886745,
    -0.004876456935981859,
    -0.014411220478775908,
    0.012502572392110445,
    -0.006335501374266343,
    0.0022279944852145635,
    -0.0005291971203120055,
    6.402098798475525e-05,
    6.227355975186405e-06,
    -3.886693871799144e-06,
    3.3898311666646035e-07,
    1.357017307857133e-07,
    -2.977944070718101e-08,
    -4.423698622135724e-09,
    1.722438935731123e-09,
    1.4036564296169185e-10,
    -7.515532324456653e-11,
)

_CPU = r"""
typedef double V __attribute__((vector_size(64), may_alias));
typedef double R __attribute__((vector_size(32), aligned(8), may_alias));
typedef long long M __attribute__((vector_size(64), may_alias));
constexpr int ROOM = 256;  // pairs evaluated at a time
alignas(64) double dx[ROOM], dy[ROOM], dz[ROOM], qj[ROOM], wi[ROOM], wj[ROOM];
alignas(64) double r2s[ROOM], slope[ROOM], value[ROOM];
int other[ROOM];
const double* __restrict x = packed.data;
double* __restrict out = ends.data;
const double* __restrict a = to_receiver.data;
const double* __restrict b = to_sender.data;
const int* __restrict list = senders.data;
const double c2 = alpha * 1.1283791670955126;
const double coefficient[] = { @ERFC@ };
const double inverse_factorial[] = { @EXP@ };

for (int i = 0; i < n_owned; i++) {
    const R xi = *(const R*)(x + 4 * (size_t)i);
    const double qi = xi[3];
    R sum = {};
    int k = row_splits.data[i];
    const int end = row_splits.data[i + 1];
    while (k < end) {
        // 1. pairs within the cutoff; a place that is not a number counts as within, so that it is seen
        int n = 0;
        for (; k < end && n < ROOM; k++) {
            const size_t j = list[k];
            const R xj = *(const R*)(x + 4 * j);
            const R d = xj - xi;
            const double r2 = d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
            other[n] = (int)j;
            dx[n] = d[0]; dy[n] = d[1]; dz[n] = d[2]; qj[n] = xj[3]; wi[n] = a[j]; wj[n] = b[j]; r2s[n] = r2;
            n += !(r2 >= cutoff_squared);
        }
        for (int m = n; m < ((n + 7) & ~7) && m < ROOM; m++) r2s[m] = 1;
        // 2. g = erfc(alpha r) / r and its slope over r
        for (int m = 0; m < n; m += 8) {
            const V r2 = *(const V*)(r2s + m);
            const V r = __builtin_elementwise_sqrt(r2);
            const V t = alpha * r;
            const V both = 1.0 / ((t + 4.0) * (t + 1.0));
            const V z = 2.0 - 12.0 * (both * (t + 1.0));
            V p = {};
            p += coefficient[@LAST@];
            for (int c = @LAST@ - 1; c >= 0; c--) p = p * z + coefficient[c];
            // exp(-t^2) = 2^n exp(w), |w| <= ln(2) / 2; adding 1.5 * 2^52 rounds to the integer n
            const V y = __builtin_elementwise_max(-(t * t), (V){} - 700.0);
            const V shifted = y * 1.4426950408889634 + 6755399441055744.0;
            const V whole = shifted - 6755399441055744.0;
            const V w = (y - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
            V e = {};
            e += inverse_factorial[12];
            for (int c = 11; c >= 0; c--) e = e * w + inverse_factorial[c];
            const M power = ((M)shifted + 1023) << 52;
            e = e * (V)power;
            const V inverse = 1.0 / r2;
            const V g = e * p * (both * (t + 4.0)) * (r * inverse);
            *(V*)(value + m) = g;
            *(V*)(slope + m) = (g + c2 * e) * inverse;
        }
        // 3. both ends
        for (int m = 0; m < n; m++) {
            const double s = slope[m] * qi * qj[m];
            const R v = {s * dx[m], s * dy[m], s * dz[m], value[m] * qj[m]};
            sum += wi[m] * v;
            R* to = (R*)(out + 4 * (size_t)other[m]);
            const R u = {-v[0], -v[1], -v[2], value[m] * qi};
            *to = *to + wj[m] * u;
        }
    }
    R* to = (R*)(out + 4 * (size_t)i);
    *to = *to + sum;
}
"""


_GPU = r"""
struct alignas(16) Two { double x, y; };  // one load
auto add = [](double* to, double value) {
#ifdef __CUDA_ARCH__
    atomicAdd(to, value);
#else
    *to += value;  // in the tests
#endif
};
const double coefficient[] = { @ERFC@ };
const int lane = n % 8, i = n / 8;
const Two* x = (const Two*)packed.data;
double* out = ends.data;
const Two xy = x[2 * (size_t)i], zq = x[2 * (size_t)i + 1];
const double steep = alpha * 1.1283791670955126;
double sx = 0, sy = 0, sz = 0, sv = 0;
const int end = row_splits.data[i + 1];
for (int k = row_splits.data[i] + lane; k < end; k += 8) {
    const size_t j = senders.data[k];
    const Two a = x[2 * j], b = x[2 * j + 1];
    const double dx = a.x - xy.x, dy = a.y - xy.y, dz = b.x - zq.x;
    const double r2 = dx * dx + dy * dy + dz * dz;
    if (r2 >= cutoff_squared) continue;
    const double inverse = 1.0 / r2, r = sqrt(r2), t = alpha * r;
    const double both = 1.0 / ((t + 4.0) * (t + 1.0)), z = 2.0 - 12.0 * (both * (t + 1.0));
    double p = coefficient[@LAST@];
    #pragma unroll
    for (int c = @LAST@ - 1; c >= 0; c--) p = p * z + coefficient[c];
    const double e = exp(-t * t);
    const double g = e * p * (both * (t + 4.0)) * (r * inverse);
    const double s = (g + steep * e) * inverse * zq.y * b.y;
    const double wi = to_receiver.data[j], wj = to_sender.data[j];
    sx += wi * s * dx;
    sy += wi * s * dy;
    sz += wi * s * dz;
    sv += wi * g * b.y;
    if (wj != 0.0) {
        add(out + 4 * j, -wj * s * dx);
        add(out + 4 * j + 1, -wj * s * dy);
        add(out + 4 * j + 2, -wj * s * dz);
        add(out + 4 * j + 3, wj * g * zq.y);
    }
}
#ifdef __CUDA_ARCH__
const unsigned eight = 0xffu << (threadIdx.x & 24);
for (int w = 4; w > 0; w /= 2) {
    sx += __shfl_xor_sync(eight, sx, w, 8);
    sy += __shfl_xor_sync(eight, sy, w, 8);
    sz += __shfl_xor_sync(eight, sz, w, 8);
    sv += __shfl_xor_sync(eight, sv, w, 8);
}
if (lane) return;
#endif
add(out + 4 * (size_t)i, sx);
add(out + 4 * (size_t)i + 1, sy);
add(out + 4 * (size_t)i + 2, sz);
add(out + 4 * (size_t)i + 3, sv);
"""


def pair_sums(
    points: torch.Tensor,
    charges: torch.Tensor,
    row_splits: torch.Tensor,
    senders: torch.Tensor,
    to_receiver: torch.Tensor,
    to_sender: torch.Tensor,
    alpha: float,
    cutoff: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over edges.

    Parameters
    ----------
    points, charges : Tensor, shapes (n, 3) and (n,), float64
        Extended rows.
    row_splits, senders, to_receiver, to_sender : Tensor
        See `nvdd_pme.real_space.Pairs`.
    alpha, cutoff : float

    Returns
    -------
    potential : Tensor, shape (n,)
    gradient : Tensor, shape (n, 3)
        Of half of charge times potential, for the points.

    Raises
    ------
    InputError
        When alpha and cutoff are too large together, or the device is served by no kernel.
    """
    if alpha * cutoff > LARGEST_SPLITTING:
        raise InputError(
            f"alpha = {alpha:g} / A with a cutoff of {cutoff:g} A: their product may be {LARGEST_SPLITTING:g} at most"
        )
    device = points.device.type
    if device not in ("cpu", "cuda"):
        raise InputError(f"device {points.device} is not served; give cpu or cuda")
    packed = torch.cat([points.detach(), charges.detach()[:, None]], dim=1)
    ends = torch.zeros_like(packed)
    n_owned = row_splits.shape[0] - 1
    lists = (row_splits, senders, to_receiver, to_sender)
    numbers = (n_owned, float(alpha), float(cutoff * cutoff))
    source, threads = (_CPU, min(1, n_owned)) if device == "cpu" else (_GPU, 8 * n_owned)
    launch(_kernel(source), threads, (packed, *lists, ends, *numbers))
    return ends[:, 3].clone(), ends[:, :3].clone(memory_format=torch.contiguous_format)


def _types() -> dict[str, Any]:
    reals, integers = array(wp.float64), array(wp.int32)
    return {
        "packed": reals,
        "row_splits": integers,
        "senders": integers,
        "to_receiver": reals,
        "to_sender": reals,
        "ends": reals,
        "n_owned": wp.int32,
        "alpha": wp.float64,
        "cutoff_squared": wp.float64,
    }


@cache
def _kernel(source: str) -> Any:
    """Compile one of the sources; `n` is the thread."""
    types = _types()

    def pairs(
        packed: Any,
        row_splits: Any,
        senders: Any,
        to_receiver: Any,
        to_sender: Any,
        ends: Any,
        n_owned: Any,
        alpha: Any,
        cutoff_squared: Any,
        n: Any,
    ) -> None: ...

    text = source.replace("@ERFC@", ", ".join(map(repr, _ERFC))).replace("@LAST@", str(len(_ERFC) - 1))
    text = text.replace("@EXP@", ", ".join(repr(1.0 / math.factorial(k)) for k in range(13)))
    native = wp.func_native(text)(typed(pairs, {**types, "n": wp.int32}))

    def nvdd_pme_pairs(
        packed: Any,
        row_splits: Any,
        senders: Any,
        to_receiver: Any,
        to_sender: Any,
        ends: Any,
        n_owned: Any,
        alpha: Any,
        cutoff_squared: Any,
    ) -> None:
        native(
            packed,
            row_splits,
            senders,
            to_receiver,
            to_sender,
            ends,
            n_owned,
            alpha,
            cutoff_squared,
            wp.tid(),
        )

    return wp.kernel(typed(nvdd_pme_pairs, types), enable_backward=False, module="unique")
