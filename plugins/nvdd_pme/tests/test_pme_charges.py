"""Where charges come from, and options and systems that are refused."""

from __future__ import annotations

import json
import subprocess
import sys

import ase
import numpy as np
import pme_kit as kit
import pytest
import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime.structures import read_structures
from nvdd_core.testing import evaluate
from nvdd_pme.charges import parse_charges
from nvdd_pme.model import load_ewald, load_pme
from nvdd_pme.parameters import Options, choose_mesh, smooth

SALT = "Na=1, Cl=-1.0"


@pytest.mark.parametrize("value", [SALT, {"Na": 1, "Cl": -1.0}, None])
def test_options_are_read(value):
    assert parse_charges("pme", value) == ({} if value is None else {11: 1.0, 17: -1.0})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Na", "Na"),
        ("Na=x", "'x'"),
        ("Qq=1", "Qq"),
        ("Na=1,Na=2", "twice"),
        ({"Na": True}, "Na"),
        (3, "3"),
        ("Na=nan", "nan"),
        ("", "empty"),
        (" ", "empty"),
        ({}, "empty"),
    ],
)
def test_bad_options_are_named(value, said):
    with pytest.raises(InputError, match=said):
        parse_charges("pme", value)


def test_sources_of_charges():
    """A column, the other column, an option; the option comes before a column."""
    atoms = kit.rock_salt()
    expected = evaluate(load_ewald(**kit.CPU), atoms, {"energy"}).energy[0]
    other = atoms.copy()
    other.set_array("initial_charges", other.arrays.pop("charges"))
    assert evaluate(load_ewald(**kit.CPU), other, {"energy"}).energy[0] == expected
    del other.arrays["initial_charges"]
    assert evaluate(load_ewald(**kit.CPU, charges=SALT), other, {"energy"}).energy[0] == expected
    atoms.arrays["charges"] *= 0.5
    assert evaluate(load_ewald(**kit.CPU, charges=SALT), atoms, {"energy"}).energy[0] == expected
    halved = evaluate(load_ewald(**kit.CPU), atoms, {"energy"}).energy[0]
    assert halved == pytest.approx(expected / 4, rel=1e-13)


def test_atoms_without_charges_are_refused():
    atoms = kit.rippled_salt()
    with pytest.raises(InputError, match="no charges"):
        evaluate(load_pme(**kit.CPU), atoms, {"energy"})
    with pytest.raises(InputError, match="Cl"):
        evaluate(load_pme(**kit.CPU, charges="Na=1"), atoms, {"energy"})
    atoms.set_array("charges", np.array([1.0] * 7 + [np.nan]))
    with pytest.raises(InputError, match="atom 7"):
        evaluate(load_pme(**kit.CPU), atoms, {"energy"})


@pytest.mark.parametrize("load", [load_ewald, load_pme])
@pytest.mark.parametrize("pbc", [[True, True, False], False])
def test_open_systems_are_refused(load, pbc):
    atoms = kit.rock_salt()
    atoms.pbc = pbc
    with pytest.raises(InputError, match="periodic"):
        evaluate(load(**kit.CPU), atoms, {"energy"})


@pytest.mark.parametrize(
    "given",
    [
        {"accuracy": 0}, {"accuracy": "high"}, {"cutoff": -1}, {"cutoff": float("nan")}, {"order": 3}, {"order": 5.5},
        {"alpha": 3.0, "cutoff": 9.0}, {"spacing": 0}, {"engine": "fast"}, {"accuracy": True},
    ],
)  # fmt: skip
def test_options_out_of_range(given):
    with pytest.raises(InputError, match=next(iter(given))):
        load_pme(**kit.CPU, **given)


def test_charges_of_nothing():
    atoms = kit.rock_salt()
    atoms.arrays["charges"] *= 0.0
    for load in (load_ewald, load_pme):
        found = evaluate(load(**kit.CPU), atoms, {"energy", "forces", "stress"})
        assert found.energy[0] == 0.0
        assert not found.forces.any()
        assert not found.stress.any()


def test_what_was_chosen_is_told():
    model = load_pme(**kit.CPU, accuracy=1e-4)
    evaluate(model, kit.rock_salt(), {"energy"})
    chosen = model.chosen[0]
    assert chosen == choose_mesh(
        torch.diag(torch.full((3,), 5.64, dtype=torch.float64)), Options(accuracy=1e-4)
    )
    text = model.describe()
    assert " x ".join(map(str, chosen.size)) in text
    assert f"order {chosen.order}" in text
    assert f"{chosen.alpha:.4g}" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accuracy": 1e-8, "cutoff": 7.0}, "force error 1e-08;"),
        ({"alpha": 0.1}, "alpha given, so the force error isn't known;"),
        ({"order": 4, "spacing": 0.5}, "order and spacing given, so the force error isn't known;"),
        ({"k_cutoff": 2.0}, "k_cutoff given, so the force error isn't known;"),
    ],
)
def test_an_error_that_nobody_knows_is_not_promised(given, said):
    model = (load_ewald if "k_cutoff" in given else load_pme)(**kit.CPU, **given)
    evaluate(model, kit.rock_salt(), {"energy"})
    assert model.describe().startswith(said)
    assert ("force error 1e" in model.describe()) == ("accuracy" in given)


def test_the_report_promises_no_error_either(tmp_path):
    kit.rock_salt().write(tmp_path / "salt.xyz")
    command = [sys.executable, "-m", "nvdd_core.cli.main", "evaluate", str(tmp_path / "salt.xyz")]
    command += ["--model", "pme", "--option", "charges=Na=1,Cl=-1", "--option", "alpha=0.3", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    told = json.loads(done.stdout)["settings"]
    assert told.startswith("alpha given, so the force error isn't known; alpha 0.3/A")


def test_options_replace_what_would_be_chosen():
    atoms = kit.rock_salt()
    model = load_pme(**kit.CPU, alpha=0.5, order=5, spacing=0.7, cutoff=8.0)
    evaluate(model, atoms, {"energy"})
    assert model.chosen[0].alpha == 0.5
    assert model.chosen[0].order == 5
    assert model.chosen[0].size == (9, 9, 9)
    model = load_ewald(**kit.CPU, alpha=0.5, k_cutoff=4.0)
    evaluate(model, atoms, {"energy"})
    assert model.chosen[0].k_cutoff == 4.0


def test_smooth_numbers():
    assert [smooth(n) for n in (1, 7, 11, 97, 128, 211)] == [1, 8, 12, 100, 128, 216]


def test_several_systems_at_once():
    frames = [kit.rock_salt(), kit.one_charge(), kit.skewed(0.3)]
    for load in (load_ewald, load_pme):
        for outputs in (
            {"energy", "forces", "stress"},
            {"energy", "forces", "stress", "node_energy", "charge_gradient"},
        ):
            alone = [evaluate(load(**kit.CPU), frame, outputs) for frame in frames]
            found = evaluate(load(**kit.CPU), frames, outputs)
            np.testing.assert_allclose(found.energy, [one.energy[0] for one in alone], rtol=1e-13)
            np.testing.assert_allclose(found.stress, [one.stress[0] for one in alone], rtol=0, atol=1e-14)
            for name, rows in found.rows.items():
                expected = np.concatenate([one.rows[name] for one in alone])
                np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)


def test_float32_is_of_positions_only():
    atoms = kit.disordered(3, 9.0)
    double = evaluate(load_pme(**kit.CPU), atoms, {"energy", "forces"})
    single = evaluate(load_pme(dtype=torch.float32, device=torch.device("cpu")), atoms, {"energy", "forces"})
    assert single.energy[0] == pytest.approx(double.energy[0], rel=1e-6)
    np.testing.assert_allclose(single.forces, double.forces, rtol=0, atol=2e-5 * np.abs(double.forces).max())


def test_ase_atoms_are_left_alone():
    atoms = kit.rock_salt()
    before = atoms.copy()
    evaluate(load_pme(**kit.CPU), atoms)
    assert isinstance(atoms, ase.Atoms)
    assert atoms == before


@pytest.mark.parametrize("column", ["charges", "initial_charges"])
def test_column_of_a_file(tmp_path, column):
    """ASE takes a column ``charges`` of a file for a calculator's result."""
    atoms = kit.rock_salt()
    atoms.set_array(column, atoms.arrays["charges"])
    for name in {"charges"} - {column}:
        del atoms.arrays[name]
    atoms.write(tmp_path / "salt.xyz", columns=["symbols", "positions", column])
    (read,) = read_structures(tmp_path / "salt.xyz", "-1")
    np.testing.assert_array_equal(read.arrays[column], [1.0] * 4 + [-1.0] * 4)
    expected = evaluate(load_ewald(**kit.CPU), kit.rock_salt(), {"energy"}).energy
    np.testing.assert_allclose(evaluate(load_ewald(**kit.CPU), read, {"energy"}).energy, expected, rtol=1e-12)
