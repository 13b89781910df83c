"""Warp kernels that run on any device: one thread a receiver, no atomic operation in the forward pass.

Key objects: `extend_kernel` (rows and their images, four numbers wide), `full_kernel` (pairs of a full list),
`gradient_kernel` (derivative of a weighted sum of row energies, for autograd). Invariant: a thread writes
only its own receiver's results, so results don't depend on scheduling; the gradient alone scatters.
Layer: plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import warp as wp

from nvdd_lj.variants import Variant, Virial, mat33_type, scalar_type, typed, vec3_type, vec4_type


@cache
def extend_kernel(dtype: torch.dtype) -> Any:
    """Kernel that writes ``[rows | images of rows]``, launched with one thread per extended row."""
    vec4 = vec4_type(dtype)
    scalar = scalar_type(dtype)

    def nvdd_lj_extend(
        positions: Any, cell: Any, system: Any, image_rows: Any, image_shifts: Any, n_given: Any, packed: Any
    ) -> None:
        row = wp.tid()
        if row < n_given:
            x = positions[row]
            packed[row] = vec4(x[0], x[1], x[2], scalar(0.0))
        else:
            m = row - n_given
            source = image_rows[m]
            h = cell[system[source]]
            s0 = scalar(image_shifts[m, 0])
            s1 = scalar(image_shifts[m, 1])
            s2 = scalar(image_shifts[m, 2])
            y = positions[source]
            packed[row] = vec4(
                y[0] + (s0 * h[0, 0] + s1 * h[1, 0] + s2 * h[2, 0]),
                y[1] + (s0 * h[0, 1] + s1 * h[1, 1] + s2 * h[2, 1]),
                y[2] + (s0 * h[0, 2] + s1 * h[1, 2] + s2 * h[2, 2]),
                scalar(0.0),
            )

    types = {
        "positions": wp.array(dtype=vec3_type(dtype)),
        "cell": wp.array(dtype=mat33_type(dtype)),
        "system": wp.array(dtype=wp.int64),
        "image_rows": wp.array(dtype=wp.int64),
        "image_shifts": wp.array2d(dtype=wp.int64),
        "n_given": wp.int32,
        "packed": wp.array(dtype=vec4),
    }
    return wp.kernel(typed(nvdd_lj_extend, types), enable_backward=False, module="unique")


@cache
def full_kernel(variant: Variant) -> Any:  # noqa: C901, PLR0915 - a kernel can't be cut up
    """Kernel of a full list, launched with one thread per receiver.

    A virial of any kind is written per row; who wants the total sums the rows.
    """
    vec3, mat33 = vec3_type(variant.dtype), mat33_type(variant.dtype)
    scalar = scalar_type(variant.dtype)
    many, linear = variant.many_species, variant.linear_term
    want_energy, want_forces = variant.want.energy, variant.want.forces
    want_virial = variant.want.virial is not Virial.NONE

    def nvdd_lj_full(
        packed: Any,
        row_splits: Any,
        senders: Any,
        species: Any,
        coefficients: Any,
        n_species: Any,
        cutoff_squared: Any,
        energy: Any,
        forces: Any,
        row_virial: Any,
    ) -> None:
        i = wp.tid()
        here = packed[i]
        table = wp.int32(0)
        if wp.static(many):
            table = n_species * species[i]
        pair = coefficients[0]
        e = scalar(0.0)
        f = vec3()
        v = mat33()
        for k in range(row_splits[i], row_splits[i + 1]):  # type: ignore[operator]
            j = senders[k]
            there = packed[j]
            d = vec3(there[0] - here[0], there[1] - here[1], there[2] - here[2])
            r2 = wp.dot(d, d)
            # written so that a row that is not a number is seen, not skipped
            if not (r2 >= cutoff_squared):
                if wp.static(many):
                    pair = coefficients[table + species[j]]
                inverse = scalar(1.0) / r2
                s = pair[0] * inverse
                s3 = s * s * s
                g = scalar(6.0) * pair[1] * (s3 * (scalar(2.0) * s3 - scalar(1.0))) * inverse
                if wp.static(linear):
                    g -= pair[3] * wp.sqrt(r2) * inverse
                if wp.static(want_energy):
                    e += scalar(0.5) * (pair[1] * s3 * (s3 - scalar(1.0)) + pair[2])
                    if wp.static(linear):
                        e += scalar(0.5) * pair[3] * wp.sqrt(r2)
                f -= g * d
                if wp.static(want_virial):
                    v -= scalar(0.5) * g * wp.outer(d, d)
        if wp.static(want_energy):
            energy[i] = e
        if wp.static(want_forces):
            forces[i] = f
        if wp.static(want_virial):
            row_virial[i, 0] = v[0, 0]
            row_virial[i, 1] = v[0, 1]
            row_virial[i, 2] = v[0, 2]
            row_virial[i, 3] = v[1, 1]
            row_virial[i, 4] = v[1, 2]
            row_virial[i, 5] = v[2, 2]

    types = {
        "packed": wp.array(dtype=vec4_type(variant.dtype)),
        "row_splits": wp.array(dtype=wp.int32),
        "senders": wp.array(dtype=wp.int32),
        "species": wp.array(dtype=wp.int32),
        "coefficients": wp.array(dtype=vec4_type(variant.dtype)),
        "n_species": wp.int32,
        "cutoff_squared": scalar,
        "energy": wp.array(dtype=scalar),
        "forces": wp.array(dtype=vec3),
        "row_virial": wp.array2d(dtype=scalar),
    }
    return wp.kernel(typed(nvdd_lj_full, types), enable_backward=False, module="unique")


@cache
def gradient_kernel(dtype: torch.dtype, half: bool, many: bool, linear: bool) -> Any:
    """Kernel of d/dx of ``sum_i weight_i energy_i`` over all extended rows, one thread per receiver.

    ``home`` is the owned row that an extended row shows, -1 for rows of other ranks. It is read in the half
    form only: there a pair's other half belongs to the energy of that row.
    """
    vec3 = vec3_type(dtype)
    scalar = scalar_type(dtype)

    def nvdd_lj_gradient(
        packed: Any,
        row_splits: Any,
        senders: Any,
        species: Any,
        home: Any,
        coefficients: Any,
        n_species: Any,
        cutoff_squared: Any,
        weight: Any,
        gradient: Any,
    ) -> None:
        i = wp.tid()
        here = packed[i]
        table = wp.int32(0)
        if wp.static(many):
            table = n_species * species[i]
        pair = coefficients[0]
        own = vec3(scalar(0.0), scalar(0.0), scalar(0.0))
        for k in range(row_splits[i], row_splits[i + 1]):  # type: ignore[operator]
            j = senders[k]
            there = packed[j]
            d = vec3(there[0] - here[0], there[1] - here[1], there[2] - here[2])
            r2 = wp.dot(d, d)
            if not (r2 >= cutoff_squared):
                if wp.static(many):
                    pair = coefficients[table + species[j]]
                inverse = scalar(1.0) / r2
                s = pair[0] * inverse
                s3 = s * s * s
                g = scalar(6.0) * pair[1] * (s3 * (scalar(2.0) * s3 - scalar(1.0))) * inverse
                if wp.static(linear):
                    g -= pair[3] * wp.sqrt(r2) * inverse
                share = weight[i]
                if wp.static(half):  # noqa: SIM102 - wp.static stands alone
                    if home[j] >= 0:
                        share += weight[home[j]]
                push = (scalar(0.5) * share * g) * d
                own += push
                wp.atomic_add(gradient, j, -push)
        wp.atomic_add(gradient, i, own)

    types = {
        "packed": wp.array(dtype=vec4_type(dtype)),
        "row_splits": wp.array(dtype=wp.int32),
        "senders": wp.array(dtype=wp.int32),
        "species": wp.array(dtype=wp.int32),
        "home": wp.array(dtype=wp.int64),
        "coefficients": wp.array(dtype=vec4_type(dtype)),
        "n_species": wp.int32,
        "cutoff_squared": scalar,
        "weight": wp.array(dtype=scalar),
        "gradient": wp.array(dtype=vec3),
    }
    return wp.kernel(typed(nvdd_lj_gradient, types), enable_backward=False, module="unique")
