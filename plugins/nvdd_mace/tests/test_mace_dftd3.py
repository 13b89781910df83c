"""MACE and DFT-D3 put together, on ranks: mace's own calculator plus s-dftd3's."""

from __future__ import annotations

import numpy as np
import pytest
from mace_ranks import Job, compare, joined, oracle

pytest.importorskip("nvdd_dftd3", reason="needs nvdd-dftd3: make conform PLUGIN=mace installs it")
dispersion = pytest.importorskip("dftd3.ase", reason="needs dftd3: make conform PLUGIN=mace installs it")


def with_dispersion(module, atoms):
    """The oracle's numbers and s-dftd3's, added."""
    found = oracle(module, atoms)
    atoms = atoms.copy()
    atoms.calc = dispersion.DFTD3(method="PBE", damping="d3bj")
    found.energy = found.energy + atoms.get_potential_energy()
    found.forces = found.forces + atoms.get_forces()
    if found.stress is not None:
        found.stress = found.stress + atoms.get_stress(voigt=False)
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rule_w(ranks, made, structures, world):
    path, module = made()
    jobs = [Job(structures[name]) for name in ("crystal", "cluster", "atom")]
    if world == 2:
        jobs += [Job(structures["triclinic"], strategy) for strategy in ("graph_partition", "wide_halo")]
    shares = ranks(world, "evaluate", path, {"dispersion": "pbe"}, jobs)
    for place, job in enumerate(jobs):
        found, true = joined([rank[place] for rank in shares]), with_dispersion(module, job.atoms)
        true.node_energy = found.node_energy  # s-dftd3 gives no energies of atoms; ours sum up to the energy
        assert np.abs(found.node_energy.sum() - found.energy).max() < 1e-9
        # as dftd3 alone against s-dftd3, whose tables are rounded (README of nvdd-dftd3)
        compare(found, true, energy=1e-9, forces=1e-8)
    # one exchange of positions serves both, one of features, one of coordination numbers
    assert all(rank[0].calls.get("exchange", 0) == (3 if world > 1 else 0) for rank in shares)
