"""Oracles and local batches for the Lennard-Jones tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from nvdd_core.graph import build_neighbors
from nvdd_core.partition import Box, Frame, segment_bounds
from nvdd_core.runtime.batch import LocalBatch


@dataclass
class System:
    positions: np.ndarray
    cell: np.ndarray
    pbc: np.ndarray
    numbers: np.ndarray
    system: np.ndarray


@dataclass
class Truth:
    energy: np.ndarray
    node_energy: np.ndarray
    forces: np.ndarray
    virial: np.ndarray
    row_virial: np.ndarray
    n_edges: int


def edges(pos, cell, pbc, rc):
    """Directed pairs by brute force; positions may be anywhere."""
    inv = np.linalg.inv(cell)
    p = pos - np.where(pbc, np.floor(pos @ inv), 0.0) @ cell
    n = [int(np.ceil(rc * np.linalg.norm(inv[:, k]))) + 1 if pbc[k] else 0 for k in range(3)]
    first, second, vectors = [], [], []
    for s in itertools.product(*[range(-k, k + 1) for k in n]):
        d = p[None] + np.array(s, float) @ cell - p[:, None]
        r2 = (d * d).sum(-1)
        i, j = np.nonzero((r2 < rc * rc) & (r2 > 1e-20))
        first.append(i)
        second.append(j)
        vectors.append(d[i, j])
    return np.concatenate(first), np.concatenate(second), np.concatenate(vectors)


def fcc_positions(nx, ny, nz, a=1.6):
    base = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    places = itertools.product(range(nx), range(ny), range(nz))
    pos = np.array([(np.array(place) + v) * a for place in places for v in base])
    k = np.arange(len(pos))
    pos = pos + 0.05 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1)
    return pos, np.diag([nx * a, ny * a, nz * a])


def make_system(pos, cell, pbc=True, numbers=18):
    pos, cell = np.asarray(pos, float), np.asarray(cell, float)
    flags = np.broadcast_to(np.asarray(pbc, bool), (3,))
    species = np.broadcast_to(np.asarray(numbers), (len(pos),))
    return System(pos, cell[None], flags[None], species, np.zeros(len(pos), int))


def join(*systems):
    return System(
        np.concatenate([s.positions for s in systems]),
        np.concatenate([s.cell for s in systems]),
        np.concatenate([s.pbc for s in systems]),
        np.concatenate([s.numbers for s in systems]),
        np.concatenate([np.full(len(s.positions), k) for k, s in enumerate(systems)]),
    )


def pair_terms(r, sigma, epsilon, rc, shift):
    def phi(d):
        return 4 * epsilon * ((sigma / d) ** 12 - (sigma / d) ** 6)

    def slope(d):
        return 4 * epsilon * (-12 * (sigma / d) ** 12 + 6 * (sigma / d) ** 6) / d

    energy, force = phi(r), slope(r)
    if shift != "none":
        energy = energy - phi(rc)
    if shift == "force":
        energy = energy - (r - rc) * slope(rc)
        force = force - slope(rc)
    return energy, force


def truth(system, parameters) -> Truth:
    """Evaluate a system with numpy in float64, pair by pair, from the definition."""
    n, n_systems = len(system.positions), len(system.cell)
    energy, forces, row_virial = np.zeros(n), np.zeros((n, 3)), np.zeros((n, 3, 3))
    species = parameters.lookup()[system.numbers]
    sigma, epsilon = np.array(parameters.sigma), np.array(parameters.epsilon)
    n_edges = 0
    for s in range(n_systems):
        rows = np.nonzero(system.system == s)[0]
        cell = np.where(system.pbc[s][:, None], system.cell[s], np.eye(3))
        i, j, d = edges(system.positions[rows], cell, system.pbc[s], parameters.cutoff)
        i, j = rows[i], rows[j]
        r = np.linalg.norm(d, axis=1)
        si, sj = species[i], species[j]
        e, slope = pair_terms(r, sigma[si, sj], epsilon[si, sj], parameters.cutoff, parameters.shift.value)
        pull = (slope / r)[:, None] * d
        np.add.at(energy, i, 0.5 * e)
        np.add.at(forces, i, pull)
        np.add.at(row_virial, i, 0.5 * pull[:, :, None] * d[:, None, :])
        n_edges += len(i)
    total = np.array([energy[system.system == s].sum() for s in range(n_systems)])
    virial = np.array([row_virial[system.system == s].sum(0) for s in range(n_systems)])
    return Truth(total, energy, forces, virial, row_virial, n_edges)


def local_batch(
    system: System,
    cutoff: float,
    *,
    owned: np.ndarray | None = None,
    form: str = "half",
    requested: tuple[str, ...] = ("energy", "forces", "stress"),
    dtype: torch.dtype = torch.float64,
    wide: bool = False,
    device: str = "cpu",
    order: Callable[[int], np.ndarray] | None = None,
) -> LocalBatch:
    """Batch of one rank that owns `owned` (default: all rows); every other row is a ghost."""
    n = len(system.positions)
    mine = np.arange(n) if owned is None else np.asarray(owned, int)
    rows = np.concatenate([mine, np.setdiff1d(np.arange(n), mine)])
    at = torch.device(device)
    cell = torch.tensor(system.cell, device=at)
    segment = torch.tensor(system.system[rows], device=at)
    box = Box.from_cells(cell, torch.tensor(system.pbc, device=at))
    raw = torch.tensor(system.positions[rows], device=at)
    low, high = segment_bounds(box.fractional(raw, segment), segment, len(system.cell))
    frame = Frame.from_bounds(box, low, high)
    frac, offset = frame.fold(raw, segment)
    folded = raw - offset
    neighbors = build_neighbors(
        folded, frac, segment, frame, len(mine), cutoff, n_receivers=n if wide else None
    )
    return LocalBatch(
        positions=folded.to(dtype),
        cell=box.cell.to(dtype),
        pbc=box.periodic,
        numbers=torch.tensor(system.numbers[rows], device=at),
        system=segment,
        ids=torch.tensor(rows, device=at),
        n_owned=len(mine),
        neighbors=neighbors.full() if form == "full" else neighbors,
        fields={},
        requested=frozenset(requested),
    )


@dataclass
class Kit:
    """The functions above, so that tests need no import from this file."""

    fcc = staticmethod(fcc_positions)
    system = staticmethod(make_system)
    join = staticmethod(join)
    truth = staticmethod(truth)
    batch = staticmethod(local_batch)
    pair_terms = staticmethod(pair_terms)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
