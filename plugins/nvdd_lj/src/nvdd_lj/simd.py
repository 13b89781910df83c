"""The CPU kernel: eight pairs at a time with the compiler's vector types.

Warp compiles the snippet below for the machine it runs on; the vectors map to whatever the processor has
(AVX-512, AVX2, NEON). One launch does the whole evaluation: rows are packed four numbers wide
(x, y, z, bits) so that a neighbour is one aligned load, pairs are summed, images are folded home, results
are written. In the half form a pair's other end is updated in the same pass: the kernel is sequential,
so this needs no atomic operation. Key object: `simd_kernel`. Invariant: no row of a receiver's list occurs
twice in it, so the eight updates of one step never meet. Layer: plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import warp as wp

from nvdd_lj.variants import Variant, Virial, scalar_type, typed

FAR = 1e15
"""Where the dummy row lies: the last step of a receiver is filled up with it, beyond any cutoff."""

SCRATCH_VIRIAL = 8
"""Numbers per row in the scratch of per-row virials: xx xy xz yy, yz zz and two of padding."""

_SOURCE = r"""
typedef @REAL@ S;
typedef @BITS@ I;
typedef I B __attribute__((may_alias));
typedef S V __attribute__((vector_size(8 * sizeof(S)), may_alias));
typedef S R __attribute__((vector_size(4 * sizeof(S)), may_alias));
typedef I M __attribute__((vector_size(8 * sizeof(S)), may_alias));
constexpr bool HALF = @HALF@, ENERGY = @ENERGY@, MANY = @MANY@, LINEAR = @LINEAR@;
constexpr bool FORCES = @FORCES@, TOTAL = @TOTAL@, ROWS = @ROWS@, VIRIAL = TOTAL || ROWS;
constexpr bool SCATTER = HALF && (FORCES || ENERGY);
S* __restrict x = packed.data;
S* __restrict f = ends.data;
S* __restrict w = virial_ends.data;
const S* given = positions.data;
const S* table = coefficients.data;
const int* __restrict list = senders.data;
const int* __restrict begin = row_splits.data;
const int n_extended = n_local + n_image, dummy = n_extended;

// 1. rows: copy, then images of copied rows unless they were given too
const int n_given = extend ? n_local : n_extended;
for (int r = 0; r < n_given; r++)
    for (int c = 0; c < 3; c++) x[4 * (size_t)r + c] = given[3 * (size_t)r + c];
for (int m = 0; m < n_extended - n_given; m++) {
    const size_t r = image_rows.data[m];
    const long long* shift = image_shifts.data + 3 * (size_t)m;
    const S* h = cell.data + 9 * (size_t)system.data[r];
    for (int c = 0; c < 3; c++)
        x[4 * (size_t)(n_local + m) + c] =
            given[3 * r + c] + ((S)shift[0] * h[c] + (S)shift[1] * h[3 + c] + (S)shift[2] * h[6 + c]);
}
if (SCATTER) for (size_t k = 0; k < 4 * (size_t)(n_extended + 1); k++) f[k] = 0;
if (HALF && ROWS) for (size_t k = 0; k < 8 * (size_t)(n_extended + 1); k++) w[k] = 0;

#define NVDD_ROW(base, q) (*(const R*)((base) + (q)))
#define NVDD_JOIN(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)
#define NVDD_LOW(v) __builtin_shufflevector(v, v, 0, 1, 2, 3)
#define NVDD_HIGH(v) __builtin_shufflevector(v, v, 4, 5, 6, 7)
// eight rows of four numbers -> four vectors of eight, lanes in the order @ORDER@, and back
#define NVDD_COLUMNS(c0, c1, c2, c3, X, Y, Z, W) \
    const V t0 = __builtin_shufflevector(c0, c1, @F0@), t1 = __builtin_shufflevector(c0, c1, @F1@); \
    const V t2 = __builtin_shufflevector(c2, c3, @F0@), t3 = __builtin_shufflevector(c2, c3, @F1@); \
    const V X = __builtin_shufflevector(@FX@), Y = __builtin_shufflevector(@FY@); \
    const V Z = __builtin_shufflevector(@FZ@), W = __builtin_shufflevector(@FW@);
#define NVDD_ADD(base, q, v) { R* p = (R*)((base) + (q)); *p = *p + (v); }
#define NVDD_ADD_ROWS(base, stride, X, Y, Z, W) { \
    const V u0 = __builtin_shufflevector(X, Y, @B0@), u1 = __builtin_shufflevector(X, Y, @B1@); \
    const V v0 = __builtin_shufflevector(Z, W, @B0@), v1 = __builtin_shufflevector(Z, W, @B1@); \
    const V oa = __builtin_shufflevector(u0, v0, @P@), ob = __builtin_shufflevector(u0, v0, @Q@); \
    const V oc = __builtin_shufflevector(u1, v1, @P@), od = __builtin_shufflevector(u1, v1, @Q@); \
    NVDD_ADD(base, stride * (size_t)j[0], NVDD_LOW(oa)) \
    NVDD_ADD(base, stride * (size_t)j[@RB@], NVDD_LOW(ob)) \
    NVDD_ADD(base, stride * (size_t)j[@RC@], NVDD_LOW(oc)) \
    NVDD_ADD(base, stride * (size_t)j[3], NVDD_LOW(od)) \
    NVDD_ADD(base, stride * (size_t)j[4], NVDD_HIGH(oa)) \
    NVDD_ADD(base, stride * (size_t)j[@RB@ + 4], NVDD_HIGH(ob)) \
    NVDD_ADD(base, stride * (size_t)j[@RC@ + 4], NVDD_HIGH(oc)) \
    NVDD_ADD(base, stride * (size_t)j[7], NVDD_HIGH(od)) }
auto total = [](const V& v) {
    const R s = NVDD_LOW(v) + NVDD_HIGH(v);
    return (s[0] + s[1]) + (s[2] + s[3]);
};

// 2. pairs; wide enough sums of the virial are carried over rows, others are added up in double row by row
constexpr bool CARRY = TOTAL && sizeof(S) == 8;
V vxx = {}, vxy = {}, vxz = {}, vyy = {}, vyz = {}, vzz = {};
for (int i = 0; i < n_owned; i++) {
    const S xi = x[4 * (size_t)i], yi = x[4 * (size_t)i + 1], zi = x[4 * (size_t)i + 2];
    const S* row = MANY ? table + (size_t)n_species * (size_t)(((const B*)x)[4 * (size_t)i + 3] >> 1) : table;
    V ax = {}, ay = {}, az = {}, ae = {};
    const int end = begin[i + 1];
    for (int k = begin[i]; k < end; k += 8) {
        int filled[8];
        const int* j = list + k;
        if (k + 8 > end) {
            for (int q = 0; q < 8; q++) filled[q] = k + q < end ? list[k + q] : dummy;
            j = filled;
        }
        const V c0 = NVDD_JOIN(NVDD_ROW(x, 4 * (size_t)j[0]), NVDD_ROW(x, 4 * (size_t)j[4]));
        const V c1 = NVDD_JOIN(NVDD_ROW(x, 4 * (size_t)j[1]), NVDD_ROW(x, 4 * (size_t)j[5]));
        const V c2 = NVDD_JOIN(NVDD_ROW(x, 4 * (size_t)j[2]), NVDD_ROW(x, 4 * (size_t)j[6]));
        const V c3 = NVDD_JOIN(NVDD_ROW(x, 4 * (size_t)j[3]), NVDD_ROW(x, 4 * (size_t)j[7]));
        NVDD_COLUMNS(c0, c1, c2, c3, xj, yj, zj, bits)
        const V dx = xj - xi, dy = yj - yi, dz = zj - zi;
        const V r2 = dx * dx + dy * dy + dz * dz;
        // written so that a row that is not a number is seen, not skipped
        const M within = ~(r2 >= cutoff_squared);
        V sigma2, epsilon4, constant, slope;
        if (MANY) {
            #define NVDD_PAIR(q) NVDD_ROW(row, (size_t)(((const B*)x)[4 * (size_t)j[q] + 3] >> 1))
            const V d0 = NVDD_JOIN(NVDD_PAIR(0), NVDD_PAIR(4)), d1 = NVDD_JOIN(NVDD_PAIR(1), NVDD_PAIR(5));
            const V d2 = NVDD_JOIN(NVDD_PAIR(2), NVDD_PAIR(6)), d3 = NVDD_JOIN(NVDD_PAIR(3), NVDD_PAIR(7));
            NVDD_COLUMNS(d0, d1, d2, d3, p0, p1, p2, p3)
            sigma2 = p0; epsilon4 = p1; constant = p2; slope = p3;
        } else {
            const V zero = {};
            sigma2 = zero + row[0]; epsilon4 = zero + row[1]; constant = zero + row[2]; slope = zero + row[3];
        }
        // three sixths: s = (sigma / r)^2; g is the outward push over r
        V s, g, radius;
        if (MANY || LINEAR) {
            const V inverse = S(1) / r2;
            s = sigma2 * inverse;
            const V s3 = s * s * s;
            g = (S(6) * epsilon4) * (s3 * (S(2) * s3 - S(1))) * inverse;
            if (LINEAR) {
                radius = __builtin_elementwise_sqrt(r2);
                g = g - slope * (radius * inverse);
            }
        } else {
            s = row[0] / r2;
            const V s3 = s * s * s;
            g = (S(6) * row[1] / row[0]) * (s3 * (S(2) * s3 - S(1)) * s);
        }
        g = (V)((M)g & within);
        V gx = g * dx, gy = g * dy, gz = g * dz, e = {};
        if (ENERGY) {
            const V s3 = s * s * s;
            e = epsilon4 * (s3 * (s3 - S(1))) + constant;
            if (LINEAR) e = e + slope * radius;
            e = S(0.5) * (V)((M)e & within);
            ae += e;
        }
        if (FORCES) { ax += gx; ay += gy; az += gz; }
        if (VIRIAL) {
            // d E / d strain = - g d d: half of a pair at each end that is owned here
            V share;
            if (HALF && TOTAL) share = S(0.5) * __builtin_convertvector(((M)bits & 1) - 2, V);
            else share = V{} - S(0.5);
            const V px = share * gx, py = share * gy, pz = share * gz;
            const V xx = px * dx, xy = px * dy, xz = px * dz, yy = py * dy, yz = py * dz, zz = pz * dz;
            vxx += xx; vxy += xy; vxz += xz; vyy += yy; vyz += yz; vzz += zz;
            if (HALF && ROWS) {
                const V zero = {};
                NVDD_ADD_ROWS(w, 8, xx, xy, xz, yy)
                NVDD_ADD_ROWS((w + 4), 8, yz, zz, zero, zero)
            }
        }
        if (SCATTER) NVDD_ADD_ROWS(f, 4, gx, gy, gz, e)
    }
    const R sum = {-total(ax), -total(ay), -total(az), total(ae)};
    if (SCATTER) {
        NVDD_ADD(f, 4 * (size_t)i, sum)
    } else {
        if (FORCES) for (int c = 0; c < 3; c++) forces.data[3 * (size_t)i + c] = sum[c];
        if (ENERGY) energy.data[i] = sum[3];
    }
    const bool more = CARRY && i + 1 < n_owned && system.data[i] == system.data[i + 1];
    if (VIRIAL && !more) {
        const S v[6] = {total(vxx), total(vxy), total(vxz), total(vyy), total(vyz), total(vzz)};
        if (TOTAL) {
            double* to = virial.data + 6 * (size_t)(n_systems > 1 ? system.data[i] : 0);
            for (int c = 0; c < 6; c++) to[c] += v[c];
        }
        if (ROWS && HALF) for (int c = 0; c < 6; c++) w[8 * (size_t)i + c] += v[c];
        if (ROWS && !HALF) for (int c = 0; c < 6; c++) row_virial.data[6 * (size_t)i + c] = v[c];
        vxx = vxy = vxz = vyy = vyz = vzz = V{};
    }
}
// 3. images of owned rows go home; what ghosts got is their owners' business and is dropped
if (HALF) for (int m = 0; m < n_image; m++) {
    const size_t r = image_rows.data[m], from = n_local + m;
    if (r >= (size_t)n_owned) continue;
    if (SCATTER) NVDD_ADD(f, 4 * r, NVDD_ROW(f, 4 * from))
    if (ROWS) for (int c = 0; c < 6; c++) w[8 * r + c] += w[8 * from + c];
}
if (HALF) for (int i = 0; i < n_owned; i++) {
    if (FORCES) for (int c = 0; c < 3; c++) forces.data[3 * (size_t)i + c] = f[4 * (size_t)i + c];
    if (ENERGY) energy.data[i] = f[4 * (size_t)i + 3];
    if (ROWS) for (int c = 0; c < 6; c++) row_virial.data[6 * (size_t)i + c] = w[8 * (size_t)i + c];
}
"""

# The two register layouts differ in which shuffles are one instruction: 128-bit units hold two float64 or
# four float32. A lane order other than 0..7 is harmless, as every vector of a step has the same.
_SHUFFLES: dict[torch.dtype, dict[str, str]] = {
    torch.float64: {
        "ORDER": "0 1 4 5 2 3 6 7",
        "F0": "0, 8, 2, 10, 4, 12, 6, 14",
        "F1": "1, 9, 3, 11, 5, 13, 7, 15",
        "FX": "t0, t2, 0, 1, 4, 5, 8, 9, 12, 13",
        "FY": "t1, t3, 0, 1, 4, 5, 8, 9, 12, 13",
        "FZ": "t0, t2, 2, 3, 6, 7, 10, 11, 14, 15",
        "FW": "t1, t3, 2, 3, 6, 7, 10, 11, 14, 15",
        "B0": "0, 8, 2, 10, 4, 12, 6, 14",
        "B1": "1, 9, 3, 11, 5, 13, 7, 15",
        "P": "0, 1, 8, 9, 2, 3, 10, 11",
        "Q": "4, 5, 12, 13, 6, 7, 14, 15",
        "RB": "2",
        "RC": "1",
    },
    torch.float32: {
        "ORDER": "0 1 2 3 4 5 6 7",
        "F0": "0, 8, 1, 9, 4, 12, 5, 13",
        "F1": "2, 10, 3, 11, 6, 14, 7, 15",
        "FX": "t0, t2, 0, 1, 8, 9, 4, 5, 12, 13",
        "FY": "t0, t2, 2, 3, 10, 11, 6, 7, 14, 15",
        "FZ": "t1, t3, 0, 1, 8, 9, 4, 5, 12, 13",
        "FW": "t1, t3, 2, 3, 10, 11, 6, 7, 14, 15",
        "B0": "0, 8, 1, 9, 4, 12, 5, 13",
        "B1": "2, 10, 3, 11, 6, 14, 7, 15",
        "P": "0, 1, 8, 9, 4, 5, 12, 13",
        "Q": "2, 3, 10, 11, 6, 7, 14, 15",
        "RB": "1",
        "RC": "2",
    },
}


@cache
def simd_kernel(variant: Variant) -> Any:
    """Compile-on-first-use kernel of a variant, launched with dimension 1 on the CPU.

    Parameters
    ----------
    variant : Variant
        Both list forms are served.

    Returns
    -------
    warp kernel
        Arguments in the order of `argument_types`. ``packed`` has ``n_local + n_image + 1`` rows of four
        numbers, the last being the dummy row far away from everything; the fourth number of a row holds, as
        integer bits, eight times its species index plus one if it belongs to another rank. ``ends`` and
        ``virial_ends`` are scratch of 4 and `SCRATCH_VIRIAL` numbers per row. ``virial`` is added to.
    """
    types = argument_types(variant.dtype)

    def simd_pairs(
        positions: Any,
        cell: Any,
        system: Any,
        image_rows: Any,
        image_shifts: Any,
        packed: Any,
        row_splits: Any,
        senders: Any,
        coefficients: Any,
        ends: Any,
        virial_ends: Any,
        energy: Any,
        forces: Any,
        virial: Any,
        row_virial: Any,
        n_owned: Any,
        n_local: Any,
        n_image: Any,
        n_species: Any,
        n_systems: Any,
        extend: Any,
        cutoff_squared: Any,
    ) -> None: ...

    native = wp.func_native(_source(variant))(typed(simd_pairs, types))

    def nvdd_lj_simd(
        positions: Any,
        cell: Any,
        system: Any,
        image_rows: Any,
        image_shifts: Any,
        packed: Any,
        row_splits: Any,
        senders: Any,
        coefficients: Any,
        ends: Any,
        virial_ends: Any,
        energy: Any,
        forces: Any,
        virial: Any,
        row_virial: Any,
        n_owned: Any,
        n_local: Any,
        n_image: Any,
        n_species: Any,
        n_systems: Any,
        extend: Any,
        cutoff_squared: Any,
    ) -> None:
        native(
            positions,
            cell,
            system,
            image_rows,
            image_shifts,
            packed,
            row_splits,
            senders,
            coefficients,
            ends,
            virial_ends,
            energy,
            forces,
            virial,
            row_virial,
            n_owned,
            n_local,
            n_image,
            n_species,
            n_systems,
            extend,
            cutoff_squared,
        )

    return wp.kernel(typed(nvdd_lj_simd, types), enable_backward=False, module="unique")


def argument_types(dtype: torch.dtype) -> dict[str, Any]:
    """Names and types of the kernel's arguments, in order; every array is flat and contiguous."""
    real, integer = scalar_type(dtype), wp.int32
    reals, indices, rows = wp.array(dtype=real), wp.array(dtype=integer), wp.array(dtype=wp.int64)
    return {
        "positions": reals,
        "cell": reals,
        "system": rows,
        "image_rows": rows,
        "image_shifts": rows,
        "packed": reals,
        "row_splits": indices,
        "senders": indices,
        "coefficients": reals,
        "ends": reals,
        "virial_ends": reals,
        "energy": reals,
        "forces": reals,
        "virial": wp.array(dtype=wp.float64),
        "row_virial": reals,
        "n_owned": integer,
        "n_local": integer,
        "n_image": integer,
        "n_species": integer,
        "n_systems": integer,
        "extend": integer,
        "cutoff_squared": real,
    }


def _source(variant: Variant) -> str:
    want = variant.want
    flags = {
        "HALF": variant.half,
        "ENERGY": want.energy,
        "FORCES": want.forces,
        "MANY": variant.many_species,
        "LINEAR": variant.linear_term,
        "TOTAL": want.virial is Virial.TOTAL,
        "ROWS": want.virial is Virial.ROWS,
    }
    wide = variant.dtype == torch.float64
    values = {"REAL": "double" if wide else "float", "BITS": "long long" if wide else "int"}
    values |= _SHUFFLES[variant.dtype]
    values |= {name: str(flag).lower() for name, flag in flags.items()}
    text = _SOURCE
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
