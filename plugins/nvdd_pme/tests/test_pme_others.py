"""Against torch-pme and, where it is installed, nvalchemi-toolkit-ops: code that is not ours."""

from __future__ import annotations

import numpy as np
import pme_kit as kit
import pytest
import torch

from nvdd_core.testing import evaluate
from nvdd_pme.model import COULOMB, load_ewald, load_pme

ALPHA, CUTOFF = 0.45, 9.0


def edges(atoms):
    from ase.neighborlist import neighbor_list

    i, j, shifts = neighbor_list("ijS", atoms, CUTOFF)
    return torch.tensor(np.stack([i, j], 1)), torch.tensor(shifts).double()


@pytest.mark.parametrize(("skew", "seed"), [(0.0, 0), (0.35, 1)])
@pytest.mark.parametrize("name", ["ewald", "pme"])
def test_torch_pme(name, skew, seed):
    """Energy, forces, stress and dE/dq of the same splitting, by torch-pme's calculators and autograd."""
    torchpme = pytest.importorskip("torchpme")
    atoms = kit.disordered(4, 14.0, skew, seed)
    pairs, shifts = edges(atoms)
    potential = torchpme.CoulombPotential(smearing=1.0 / (np.sqrt(2.0) * ALPHA)).double()
    if name == "ewald":
        theirs = torchpme.EwaldCalculator(potential, lr_wavelength=0.75, full_neighbor_list=True)
        ours, relative = load_ewald(**kit.CPU, alpha=ALPHA, cutoff=CUTOFF, accuracy=1e-9), 1e-8
    else:
        theirs = torchpme.PMECalculator(potential, 0.4, interpolation_nodes=7, full_neighbor_list=True)
        ours, relative = load_pme(**kit.CPU, alpha=ALPHA, cutoff=CUTOFF, accuracy=1e-8), 2e-6
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    x0 = torch.tensor(atoms.positions, requires_grad=True)
    q = torch.tensor(atoms.arrays["charges"], requires_grad=True)
    symmetric = 0.5 * (strain + strain.T)
    x, cell = x0 + x0 @ symmetric, torch.tensor(atoms.cell.array)
    cell = cell + cell @ symmetric
    r = (x[pairs[:, 1]] - x[pairs[:, 0]] + shifts @ cell).norm(dim=1)
    energy = COULOMB * (q[:, None] * theirs.double()(q[:, None], cell, x, pairs, r)).sum()
    gradient, virial, by_charge = torch.autograd.grad(energy, [x0, strain, q])
    found = evaluate(ours, atoms, {"energy", "forces", "stress", "charge_gradient"})
    assert found.energy[0] == pytest.approx(float(energy), rel=relative)
    scale = float(gradient.abs().max())
    np.testing.assert_allclose(found.forces, -gradient.numpy(), rtol=0, atol=relative * scale)
    stress = virial.numpy() / atoms.cell.volume
    np.testing.assert_allclose(found.stress[0], stress, rtol=0, atol=3 * relative * np.abs(stress).max())
    np.testing.assert_allclose(
        found.rows["charge_gradient"], by_charge.numpy(), rtol=0, atol=relative * float(by_charge.abs().max())
    )


def test_nvalchemi():
    """PME of the same splitting on a fine mesh, energy and forces."""
    electrostatics = pytest.importorskip("nvalchemiops.torch.interactions.electrostatics")
    atoms = kit.disordered(4, 14.0, 0.35, 1)
    pairs, shifts = edges(atoms)
    order = torch.argsort(pairs[:, 0], stable=True)
    ptr = torch.cat([torch.zeros(1), torch.bincount(pairs[:, 0], minlength=len(atoms)).cumsum(0)]).int()
    x = torch.tensor(atoms.positions, requires_grad=True)
    energy = (
        COULOMB
        * electrostatics.particle_mesh_ewald(
            x,
            torch.tensor(atoms.arrays["charges"]),
            torch.tensor(atoms.cell.array)[None],
            alpha=ALPHA,
            mesh_dimensions=(54, 54, 54),
            spline_order=6,
            neighbor_list=pairs[order].T.contiguous().int(),
            neighbor_ptr=ptr,
            neighbor_shifts=shifts[order].int(),
        ).sum()
    )
    (gradient,) = torch.autograd.grad(energy, x)
    found = evaluate(
        load_pme(**kit.CPU, alpha=ALPHA, cutoff=CUTOFF, accuracy=1e-8), atoms, {"energy", "forces"}
    )
    assert found.energy[0] == pytest.approx(float(energy), rel=1e-6)
    np.testing.assert_allclose(found.forces, -gradient, rtol=0, atol=2e-6 * float(gradient.abs().max()))
