"""Structures, an oracle and models of the tests of nvdd-pme; ranks import this module by name."""

from __future__ import annotations

import itertools
from dataclasses import replace

import ase
import numpy as np
import torch
from scipy.special import erfc

from nvdd_core.runtime import refresh_neighbors
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.spec import DistributionSpec
from nvdd_pme.model import COULOMB, load_ewald, load_pme

CPU = {"dtype": torch.float64, "device": torch.device("cpu")}
CASES_COULOMB = 14.399645  # eV A, with which the numbers of the cases O-28 to O-31 were made
UNIT = COULOMB / CASES_COULOMB


def ions(positions, cell, charges, symbols="H"):
    names = [symbols] * len(charges) if isinstance(symbols, str) else symbols
    atoms = ase.Atoms(names, positions=positions, cell=cell, pbc=True)
    atoms.set_array("charges", np.asarray(charges, float))
    return atoms


def rock_salt(a=5.64):
    b = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    places = a * np.concatenate([b, b + np.array([0.5, 0, 0])])
    return ions(places, [a] * 3, [1.0] * 4 + [-1.0] * 4, ["Na"] * 4 + ["Cl"] * 4)


def one_charge():
    return ions([[1.0, 2.0, 3.0]], [10.0] * 3, [1.0])


SKEWED_CELL = np.array([(6.2, 0, 0), (1.1, 5.3, 0), (0.6, -0.8, 5.7)])


def skewed(last=-0.7):
    places = [(0.4, 0.6, 0.5), (3.1, 1.2, 2.2), (1.4, 3.3, 4.1), (4.4, 2.6, 1.1)]
    return ions(places, SKEWED_CELL, [1.0, -1.0, 0.7, last])


def disordered(m=4, side=13.0, skew=0.0, seed=0):
    """m^3 charges off a grid, not neutral for odd seeds."""
    r = np.random.default_rng(seed)
    grid = np.array(list(itertools.product(range(m), repeat=3)))
    cell = side * np.array([[1.0, 0.0, 0.0], [skew, 1.0, 0.0], [-0.6 * skew, 0.4 * skew, 1.0]])
    charges = np.where(grid.sum(1) % 2, 1.0, -1.0)
    if seed % 2:
        charges = r.permutation(charges) * r.uniform(0.5, 1.5, len(grid))
    return ions((grid + 0.35 * r.uniform(-1, 1, grid.shape)) / m @ cell, cell, charges)


def sheared(atoms, times):
    """The same crystal, its third lattice vector longer by that many of the first."""
    made, cell = atoms.copy(), atoms.cell.array.copy()
    cell[2] += times * cell[0]
    made.set_cell(cell)
    return made


def force_unit(atoms):
    """What the nearest neighbour of a simple cubic lattice of that density pulls."""
    return COULOMB * (len(atoms) / atoms.cell.volume) ** (2 / 3) * (atoms.arrays["charges"] ** 2).mean()


# The cases of O-28 with their energies, eV, for CASES_COULOMB.
O28 = {
    "one charge": (one_charge(), -2.0428038),
    "rock salt": (rock_salt(), -35.6940564),
    "rock salt less one": (rock_salt()[:7], -30.3925349),
    "skewed": (skewed(), -6.9215946),
    "skewed, charged": (skewed(0.3), -8.1264009),
}


def direct_ewald(atoms, alpha=0.5, digits=6.2):
    """Energy, forces and dE/dq by the textbook sum, converged to rounding; numpy only."""
    x, cell, q = atoms.positions, atoms.cell.array, atoms.arrays["charges"]
    volume, inverse = abs(np.linalg.det(cell)), np.linalg.inv(cell)
    reach = digits / alpha
    n = [int(np.ceil(reach * np.linalg.norm(inverse[:, k]))) + 1 for k in range(3)]
    potential, forces = np.zeros(len(q)), np.zeros((len(q), 3))
    x = x - np.floor(x @ inverse) @ cell
    for shift in itertools.product(*(range(-k, k + 1) for k in n)):
        d = x[None] + np.array(shift, float) @ cell - x[:, None]
        r = np.sqrt((d * d).sum(-1))
        near = (r > 1e-10) & (r < reach)
        r[~near] = 1.0
        g = np.where(near, erfc(alpha * r) / r, 0.0)
        steep = np.where(near, (g + 2 * alpha / np.sqrt(np.pi) * np.exp(-((alpha * r) ** 2))) / r**2, 0.0)
        potential += g @ q
        forces -= q[:, None] * np.einsum("ij,ijk->ik", steep * q, d)
    largest = 2 * alpha * digits
    m = [int(np.ceil(largest * np.linalg.norm(cell[k]) / (2 * np.pi))) for k in range(3)]
    for h in itertools.product(*(range(-k, k + 1) for k in m)):
        k = 2 * np.pi * inverse @ np.array(h, float)
        k2 = k @ k
        if not 0 < k2 < largest**2:
            continue
        wave = np.exp(1j * x @ k)
        total = (q * wave).sum()
        g = 4 * np.pi / volume * np.exp(-k2 / (4 * alpha**2)) / k2
        potential += g * (wave.conj() * total).real
        forces += q[:, None] * g * (wave.conj() * total).imag[:, None] * -k
    potential -= 2 * alpha / np.sqrt(np.pi) * q + np.pi / (alpha**2 * volume) * q.sum()
    return COULOMB * 0.5 * q @ potential, COULOMB * forces, COULOMB * potential


class MovingCharges:
    """O-31: charges that depend on where neighbours are, in front of a Coulomb model."""

    layers = 2
    reach = 4.0

    def __init__(self, name="ewald", **options):
        self.inner = {"ewald": load_ewald, "pme": load_pme}[name](**CPU, **options)

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def distribution_spec(self, strategy):
        return self.inner.distribution_spec(strategy) | MLIPSpec(
            distribution=DistributionSpec(strategy=strategy)
        )

    def forward(self, batch):
        receivers = batch.edge_index[1]
        inside = (1.0 - batch.edge_vectors().square().sum(1) / self.reach**2).clamp(min=0.0)
        h = batch.positions.new_zeros(batch.n_local).index_add(0, receivers, inside.square())
        z = torch.where(batch.numbers == 11, 1.0, -1.0).double()
        q = refresh_neighbors(z * (1.0 + 0.05 * torch.tanh(h)))
        return self.inner.forward(replace(batch, fields={**batch.fields, "charges": q}))


def load_moving(*, dtype, device, name="ewald", **options):
    return MovingCharges(name, **options)


def rippled_salt():
    atoms = rock_salt()
    k = np.arange(8)
    atoms.positions += 0.1 * np.stack([np.sin(1.3 * k), np.sin(2.1 * k), np.sin(3.7 * k)], 1)
    del atoms.arrays["charges"]
    return atoms
