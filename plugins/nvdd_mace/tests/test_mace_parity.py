"""Energies, forces and stress against mace's own ASE calculator, on one to eight ranks, under every strategy.

``NVDD_MACE_ALL=1`` runs the whole product of interactions, worlds and strategies; ``-rP`` shows the differences.
"""

from __future__ import annotations

import os

import ase
import numpy as np
import pytest
import torch
from mace_ranks import Job, compare, joined, oracle

from nvdd_mace.conformance import INTERACTIONS

SYSTEMS = ("crystal", "triclinic", "left-handed", "slab", "cluster", "atom", "rod")
STRATEGIES = ("halo", "graph_partition", "wide_halo")
ALL = bool(os.environ.get("NVDD_MACE_ALL"))


def short(name):
    return name.removeprefix("RealAgnostic").removesuffix("InteractionBlock") or "plain"


def check(ranks, model, structures, world, jobs, options=None, head=None, timeout=120):
    """Compare jobs given as (structure, strategy) with the oracle; return shares and largest differences."""
    path, module = model
    work = [Job(structures[name], strategy) for name, strategy in jobs]
    shares = ranks(world, "evaluate", path, options or {}, work, timeout=timeout)
    truth = {name: oracle(module, structures[name], head) for name in dict(jobs)}
    off = [
        compare(joined([rank[place] for rank in shares]), truth[name]) for place, (name, _) in enumerate(jobs)
    ]
    return shares, {quantity: max(each[quantity] for each in off) for quantity in off[0]}


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=short)
def test_interactions(ranks, made, structures, interaction):
    """One rank, which reads the file safely, and two see every system; other strategies and worlds some of them."""
    model = made(interaction)
    check(ranks, model, structures, 1, [(name, "halo") for name in SYSTEMS], {"trust": False})
    jobs = [(name, "halo") for name in SYSTEMS]
    jobs += [(name, other) for name in ("rod", "triclinic", "atom") for other in STRATEGIES[1:]]
    check(ranks, model, structures, 2, jobs)
    for world in (3, 4):
        check(ranks, model, structures, world, [(n, "halo") for n in ("rod", "cluster", "atom")])


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[5]], ids=short)
def test_eight_ranks(ranks, made, structures, interaction):
    jobs = [(name, strategy) for name in ("rod", "atom") for strategy in STRATEGIES]
    check(ranks, made(interaction), structures, 8, jobs)


@pytest.mark.skipif(not ALL, reason="NVDD_MACE_ALL=1 runs the whole product")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interaction", INTERACTIONS, ids=short)
def test_whole_product(ranks, made, structures, interaction, world):
    jobs = [(name, strategy) for name in SYSTEMS for strategy in STRATEGIES]
    _, off = check(ranks, made(interaction), structures, world, jobs, timeout=600)
    print({quantity: f"{value:.1e}" for quantity, value in off.items()})


VARIANTS = {
    "MACE": {"kind": "MACE"},
    "MACE one layer": {"kind": "MACE", "layers": 1},
    "one layer": {"layers": 1},
    "three layers": {"layers": 3},
    "four layers": {"layers": 4, "hidden": "2x0e+2x1o"},
    "ZBL and Agnesi": {"pair_repulsion": True, "distance_transform": "Agnesi"},
    "plain first layer": {"first": "RealAgnosticInteractionBlock"},
    "narrow edges": {"edge_irreps": "2x0e+2x1o", "interaction": INTERACTIONS[5], "apply_cutoff": False},
    "narrow edges, attention": {"edge_irreps": "2x0e+2x1o", "interaction": INTERACTIONS[4]},
    "bias readout": {"readout_cls": "NonLinearBiasReadoutBlock", "interaction": INTERACTIONS[5]},
    "agnostic product": {"use_agnostic_product": True, "use_last_readout_only": True, "use_so3": True},
    "wide last layer": {"keep_last_layer_irreps": True, "correlation": [3, 2]},
    "gaussians": {"radial_type": "gaussian", "distance_transform": "Soft"},
    "odd scalars": {"hidden": "4x0e+4x0o+4x1o+4x1e"},
    "no angles": {"max_ell": 0, "hidden": "4x0e"},
    "gate abs": {"gate": torch.abs},
    "gate tanh": {"gate": torch.tanh},
}


def arguments(variant):
    from mace import modules

    found = {**VARIANTS[variant]}
    if "readout_cls" in found:
        found["readout_cls"] = modules.readout_classes[found["readout_cls"]]
    if "edge_irreps" in found:
        from e3nn import o3

        found["edge_irreps"] = o3.Irreps(found["edge_irreps"])
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(ranks, made, structures, variant):
    """The file is read safely for one rank and by trust for two; both give the oracle's numbers."""
    options = arguments(variant)
    model = made(**options)
    check(ranks, model, structures, 1, [("crystal", "halo")], {"trust": False})
    jobs = [("rod", "halo"), ("slab", "graph_partition"), ("triclinic", "wide_halo")]
    check(ranks, model, structures, 2, jobs)


@pytest.mark.parametrize("name", [*INTERACTIONS, *VARIANTS], ids=short)
def test_on_tensors_that_stay(ranks, made, structures, name):
    """As steady steps are on GPUs: rows and edges too many, some of these longer than the cutoff."""
    model = made(name) if name in INTERACTIONS else made(**arguments(name))
    systems = ("rod", "slab", "triclinic", "cluster", "atom")
    strategies = STRATEGIES + STRATEGIES[:2]
    path, module = model
    still = {system: np.zeros((len(structures[system]), 3)) for system in systems}
    work = [
        Job(structures[system], strategy, 0.4, (still[system],) * 2, capture="on")
        for system, strategy in zip(systems, strategies, strict=True)
    ]
    for world in (1, 2):
        shares = ranks(world, "evaluate", path, {}, work)
        for place, system in enumerate(systems):
            compare(joined([rank[place] for rank in shares]), oracle(module, structures[system]))


def test_repulsion_of_close_atoms_has_all_its_digits(ranks, made):
    """Torch's default on the ranks is float32, on which mace's ZBL depends."""
    model = made(pair_repulsion=True, distance_transform="Agnesi")
    atoms = ase.Atoms("SiOSi", [[0, 0, 0], [0, 0.4, 0.8], [0.3, 4.0, 4.0]], cell=[9, 9, 9], pbc=True)
    for world in (1, 2):
        check(ranks, model, {"close": atoms}, world, [("close", "halo")])


@pytest.mark.parametrize("interaction", INTERACTIONS, ids=short)
def test_fused_convolutions(ranks, made, structures, interaction):
    (path, module), atoms = made(interaction), structures["rod"]
    compare(joined(ranks(2, "fused", path, Job(atoms))), oracle(module, atoms))


def test_heads(ranks, made, structures):
    """Each head of a model with several has its own numbers."""
    heads = ("Default", "pt_head")
    model = made(heads=heads)
    energies = []
    for head in heads:
        jobs = [("rod", "halo"), ("slab", "wide_halo")]
        shares, _ = check(ranks, model, structures, 2, jobs, {"head": head}, head)
        check(ranks, model, structures, 1, jobs[:1], {"head": head, "trust": False}, head)
        energies.append(float(shares[0][0].energy[0]))
    assert abs(energies[0] - energies[1]) > 1.0


def test_several_systems(ranks, made, structures):
    """A batch gives what each system gives alone, also where a rank has no atom of one."""
    path, module = made()
    frames = [structures[name] for name in ("triclinic", "crystal", "rod")]
    shares = ranks(3, "evaluate", path, {}, [Job(frames), Job(frames, "wide_halo")])
    for place in range(2):
        found, start = joined([rank[place] for rank in shares]), 0
        for s, atoms in enumerate(frames):
            true = oracle(module, atoms)
            rows = slice(start, start + len(atoms))
            assert abs(found.energy[s] - true.energy[0]) / len(atoms) < 1e-11
            np.testing.assert_allclose(found.forces[rows], true.forces, rtol=0, atol=1e-9)
            np.testing.assert_allclose(found.stress[s], true.stress, rtol=0, atol=1e-9)
            start += len(atoms)


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[5]], ids=short)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_skin(ranks, made, structures, interaction, strategy):
    """Pairs between cutoff and cutoff + skin, which a kept list holds, change nothing, biases of layers included."""
    (path, module), atoms = made(interaction), structures["rod"]
    move = 0.05 * np.sin(np.arange(3.0 * len(atoms))).reshape(-1, 3)
    jobs = [Job(atoms, strategy, skin=0.6, moves=(0.5 * move, move))]
    shares = ranks(2, "evaluate", path, {}, jobs)
    moved = atoms.copy()
    moved.positions += move
    compare(joined([rank[0] for rank in shares]), oracle(module, moved))


def test_float32(ranks, made, structures):
    """A float64 file evaluated in float32, and a float32 file in either, are what mace makes of them."""
    rod = structures["rod"]
    path, module = made()
    single, small = made(dtype=torch.float32)
    shares = ranks(2, "evaluate", path, {"dtype": "float32"}, [Job(rod)])
    compare(joined([rank[0] for rank in shares]), oracle(module, rod), energy=1e-5, forces=1e-4)
    for trust in (True, False):
        shares = ranks(2, "evaluate", single, {"trust": trust}, [Job(rod)])
        compare(joined([rank[0] for rank in shares]), oracle(small, rod))


def test_node_energies_do_not_depend_on_ranks(ranks, made, structures):
    path, _ = made(layers=3)
    found = []
    for world in (1, 3):
        shares = ranks(world, "evaluate", path, {}, [Job(structures["rod"])])
        found.append(joined([rank[0] for rank in shares]).node_energy)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-11)
