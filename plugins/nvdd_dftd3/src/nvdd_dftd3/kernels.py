"""Warp kernels over the pairs of a neighbour list, for CPU and GPU, in float64.

Key objects: `count_kernel` and its derivative `count_gradient_kernel` (coordination numbers), `energy_kernel` (pair
energies with or without derivatives). All take half and full lists: a pair that is listed once and acts on both ends
adds to both. `lanes` threads share a receiver. Invariant: on a CPU one thread runs everything in order, so results are
the same bits each time; on a GPU sums are atomic. Layer: plugin.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import warp as wp

STEEPNESS = 16.0
"""Of the step from counted to not counted, in the method's definition."""

_REALS, _ROWS = wp.array(dtype=wp.float64), wp.array(dtype=wp.int32)
_LIST = {
    "points": wp.array(dtype=wp.vec3d),
    "splits": _ROWS,
    "senders": _ROWS,
    "rows": _ROWS,
    "half": wp.int32,
    "cutoff_squared": wp.float64,
    "lanes": wp.int32,
}
COUNT_TYPES = {**_LIST, "n_receivers": wp.int32, "radii": _REALS, "cn": _REALS}
COUNT_GRADIENT_TYPES = {
    **_LIST,
    "n_receivers": wp.int32,
    "radii": _REALS,
    "weight": _REALS,
    "gradient": wp.array(dtype=wp.vec3d),
}
ENERGY_TYPES = {
    **_LIST,
    "n_owned": wp.int32,
    "species": _ROWS,
    "n_species": wp.int32,
    "pairs": wp.array(dtype=wp.vec4d),
    "c6": _REALS,
    "weights": _REALS,
    "weight": _REALS,
    "energy": _REALS,
    "gradient": wp.array(dtype=wp.vec3d),
    "cn_gradient": _REALS,
}


def _kernel(function: Any, types: dict[str, Any]) -> Any:
    function.__annotations__ = dict(types)
    return wp.kernel(function, enable_backward=False, module="unique")


@wp.func  # type: ignore[untyped-decorator]
def _counted(ratio: Any) -> Any:
    """How much of a neighbour counts, by the sum of the radii over the distance."""
    one = wp.float64(1.0)
    return one / (one + wp.exp(wp.float64(STEEPNESS) * (one - ratio)))


@cache
def count_kernel() -> Any:
    """Kernel that adds to ``cn`` (n_receivers,) what each pair counts; launched with n_receivers times lanes."""

    def nvdd_dftd3_count(
        points: Any,
        splits: Any,
        senders: Any,
        rows: Any,
        half: Any,
        cutoff_squared: Any,
        lanes: Any,
        n_receivers: Any,
        radii: Any,
        cn: Any,
    ) -> None:
        thread = wp.tid()
        i = thread // lanes
        here = points[i]
        total = wp.float64(0.0)
        for k in range(splits[i] + thread - i * lanes, splits[i + 1], lanes):
            j = senders[k]
            d = points[j] - here
            r2 = wp.dot(d, d)
            if not (r2 > cutoff_squared):
                home = rows[j]
                count = _counted((radii[i] + radii[home]) / wp.sqrt(r2))
                total += count
                if half == 1 and home < n_receivers:
                    wp.atomic_add(cn, home, count)
        wp.atomic_add(cn, i, total)

    return _kernel(nvdd_dftd3_count, COUNT_TYPES)


@cache
def count_gradient_kernel() -> Any:
    """Kernel that adds d(sum_i weight_i cn_i) / d(points) to ``gradient`` (n_extended, 3)."""

    def nvdd_dftd3_count_gradient(
        points: Any,
        splits: Any,
        senders: Any,
        rows: Any,
        half: Any,
        cutoff_squared: Any,
        lanes: Any,
        n_receivers: Any,
        radii: Any,
        weight: Any,
        gradient: Any,
    ) -> None:
        thread = wp.tid()
        i = thread // lanes
        here = points[i]
        total = wp.vec3d()
        for k in range(splits[i] + thread - i * lanes, splits[i + 1], lanes):
            j = senders[k]
            d = points[j] - here
            r2 = wp.dot(d, d)
            if not (r2 > cutoff_squared):
                home = rows[j]
                share = weight[i]
                if half == 1 and home < n_receivers:
                    share += weight[home]
                ratio = (radii[i] + radii[home]) / wp.sqrt(r2)
                count = _counted(ratio)
                uncounted = wp.float64(1.0) - count
                pull = d * (-share * wp.float64(STEEPNESS) * count * uncounted * ratio / r2)
                total += pull
                wp.atomic_add(gradient, j, pull)
        wp.atomic_add(gradient, i, total * wp.float64(-1.0))

    return _kernel(nvdd_dftd3_count_gradient, COUNT_GRADIENT_TYPES)


@cache
def energy_kernel(width: int, derive: bool) -> Any:  # noqa: PLR0915 - a kernel cannot be cut up
    """Kernel that adds half of each pair's energy to ``energy`` (n_owned,) of its ends.

    With `derive` it adds derivatives of ``sum_i weight_i energy_i``, too: by points to ``gradient`` (n_extended, 3), by
    coordination numbers to ``cn_gradient`` (n_local,). Otherwise these two may be empty.

    Parameters
    ----------
    width : int
        References of an element, at most. ``c6`` (n_receivers, U, width) are the sums over a receiver's references,
        ``weights`` (n_local, width) those of its neighbours' references; with `derive` each row holds its values, then
        their derivatives by the coordination number.
    derive : bool
    """
    row = 2 * width if derive else width

    def nvdd_dftd3_energy(  # noqa: PLR0915
        points: Any,
        splits: Any,
        senders: Any,
        rows: Any,
        half: Any,
        cutoff_squared: Any,
        lanes: Any,
        n_owned: Any,
        species: Any,
        n_species: Any,
        pairs: Any,
        c6: Any,
        weights: Any,
        weight: Any,
        energy: Any,
        gradient: Any,
        cn_gradient: Any,
    ) -> None:
        thread = wp.tid()
        i = thread // lanes
        here = points[i]
        own = n_species * species[i]
        own_share = wp.float64(0.0)
        if i < n_owned:
            own_share = weight[i]
        total, total_cn, total_pull = wp.float64(0.0), wp.float64(0.0), wp.vec3d()
        for k in range(splits[i] + thread - i * lanes, splits[i + 1], lanes):
            j = senders[k]
            d = points[j] - here
            r2 = wp.dot(d, d)
            if not (r2 > cutoff_squared):
                home = rows[j]
                share = own_share
                shared = half == 1 and home < n_owned
                if shared:
                    share += weight[home]
                other = species[home]
                pair = pairs[own + other]
                place = (i * n_species + other) * wp.static(row)
                there = home * wp.static(row)
                c, c_here, c_there = wp.float64(0.0), wp.float64(0.0), wp.float64(0.0)
                for a in range(wp.static(width)):
                    c += c6[place + a] * weights[there + a]
                    if wp.static(derive):
                        c_here += c6[place + wp.static(width) + a] * weights[there + a]
                        c_there += c6[place + a] * weights[there + wp.static(width) + a]
                r4 = r2 * r2
                six = wp.float64(1.0) / (r4 * r2 + pair[2])
                eight = wp.float64(1.0) / (r4 * r4 + pair[3])
                s6 = wp.float64(-0.5) * pair[0] * six
                s8 = wp.float64(-0.5) * pair[1] * eight
                unit = s6 + s8
                e = c * unit
                total += e
                if shared:
                    wp.atomic_add(energy, home, e)
                if wp.static(derive):
                    total_cn += share * unit * c_here
                    wp.atomic_add(cn_gradient, home, share * unit * c_there)
                    slope = s6 * six * wp.float64(6.0) * r4 + s8 * eight * wp.float64(8.0) * r4 * r2
                    pull = d * (-share * c * slope)
                    total_pull += pull
                    wp.atomic_add(gradient, j, pull)
        if i < n_owned:
            wp.atomic_add(energy, i, total)
        if wp.static(derive):
            wp.atomic_add(cn_gradient, i, total_cn)
            wp.atomic_add(gradient, i, total_pull * wp.float64(-1.0))

    return _kernel(nvdd_dftd3_energy, ENERGY_TYPES)
