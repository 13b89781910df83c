"""Brute-force answers in numpy, and the structures of shared/cases/open.md."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
CUTOFF = 2.5


def directed_edges(
    pos: ArrayLike, cell: ArrayLike, pbc: ArrayLike, cutoff: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """Receiver, sender and vector of every directed pair closer than `cutoff`, by a loop over images."""
    x, h, periodic = np.asarray(pos, float), np.asarray(cell, float), np.asarray(pbc, bool)
    h = np.where(periodic[:, None], h, np.eye(3)) if not periodic.all() else h
    inverse = np.linalg.inv(h)
    folded = x - np.where(periodic, np.floor(x @ inverse), 0.0) @ h
    reach = [int(np.ceil(cutoff * np.linalg.norm(inverse[:, k]))) + 1 if periodic[k] else 0 for k in range(3)]
    out_i, out_j, out_d = [], [], []
    for shift in itertools.product(*[range(-k, k + 1) for k in reach]):
        d = folded[None] + np.array(shift, float) @ h - folded[:, None]
        r2 = (d * d).sum(-1)
        i, j = np.nonzero((r2 < cutoff * cutoff) & (r2 > 1e-20))
        out_i.append(i)
        out_j.append(j)
        out_d.append(d[i, j])
    return np.concatenate(out_i), np.concatenate(out_j), np.concatenate(out_d)


def fcc(nx: int, ny: int, nz: int, a: float = 1.6) -> tuple[Array, Array]:
    """Perturbed fcc block without random numbers: positions and cell."""
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    pos = np.array(
        [
            (np.array([x, y, z]) + b) * a
            for x in range(nx)
            for y in range(ny)
            for z in range(nz)
            for b in basis
        ]
    )
    k = np.arange(len(pos))
    ripple = 0.05 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1)
    return pos + ripple, np.diag([nx * a, ny * a, nz * a])


def triclinic() -> tuple[Array, Array]:
    """The 27 atoms of O-04."""
    cell = np.array([[3.6, 0, 0], [1.7, 3.4, 0], [-1.5, 1.6, 3.5]])
    frac = np.array(list(itertools.product(range(3), repeat=3))) / 3.0
    k = np.arange(27)
    return frac @ cell + 0.04 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1), cell


def unfolded_shifts(n: int) -> NDArray[np.int64]:
    """Lattice shifts of O-01."""
    k = np.arange(n)
    return np.stack([(7 * k % 5) - 2, (11 * k % 7) - 3, (13 * k % 3) - 1], 1)


def lj(pos: ArrayLike, cell: ArrayLike, pbc: ArrayLike, cutoff: float = CUTOFF) -> tuple[float, Array, Array]:
    """Energy, forces and virial dE/d(strain) of plain truncated 12-6 with epsilon = sigma = 1."""
    i, _, d = directed_edges(pos, cell, pbc, cutoff)
    r2 = (d * d).sum(1)
    s6 = r2**-3
    energy = float((2.0 * (s6 * s6 - s6)).sum())
    slope = -24.0 * (2.0 * s6 * s6 - s6) / r2  # phi'(r) / r
    forces = np.zeros_like(np.asarray(pos, float))
    np.add.at(forces, i, slope[:, None] * d)
    return energy, forces, 0.5 * np.einsum("e,ei,ej->ij", slope, d, d)


def _weights(
    pos: ArrayLike, cell: ArrayLike, pbc: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    i, j, d = directed_edges(pos, cell, pbc, CUTOFF)
    return i, j, (1.0 - (d * d).sum(1) / CUTOFF**2) ** 2


def toy2(pos: ArrayLike, cell: ArrayLike, pbc: ArrayLike) -> float:
    """Energy of the two-layer stand-in TOY2."""
    n = len(np.asarray(pos))
    i, j, w = _weights(pos, cell, pbc)
    h = np.bincount(i, w, n)
    m = np.bincount(i, np.tanh(0.1 * h[j]) * w, n)
    return float(0.01 * (m**2).sum())


def gate(pos: ArrayLike, cell: ArrayLike, pbc: ArrayLike) -> float:
    """Energy of the model GATE (O-22): a product over the edges in which an atom is the neighbour."""
    n = len(np.asarray(pos))
    _, j, w = _weights(pos, cell, pbc)
    eta = np.exp(np.bincount(j, np.log1p(-0.05 * w), n))
    return float((w * eta[j]).sum())


def numerical_force(energy, pos: Array, cell: Array, pbc: ArrayLike, atom: int, axis: int) -> float:
    """Minus the central difference of ``energy(pos, cell, pbc)``, h = 1e-5."""
    h = 1e-5
    up, down = pos.copy(), pos.copy()
    up[atom, axis] += h
    down[atom, axis] -= h
    return float(-(energy(up, cell, pbc) - energy(down, cell, pbc)) / (2 * h))


def numerical_stress(energy, pos: Array, cell: Array, pbc: ArrayLike) -> Array:
    """Central difference of ``energy`` with respect to a symmetric strain, over the volume."""
    h = 1e-5
    out = np.zeros((3, 3))
    for a in range(3):
        for b in range(3):
            strain = np.zeros((3, 3))
            strain[a, b] += 0.5 * h
            strain[b, a] += 0.5 * h
            up, down = np.eye(3) + strain, np.eye(3) - strain
            out[a, b] = (energy(pos @ up, cell @ up, pbc) - energy(pos @ down, cell @ down, pbc)) / (2 * h)
    return out / abs(np.linalg.det(cell))
