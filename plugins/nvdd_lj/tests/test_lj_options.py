"""Options of the model: what they mean and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from nvdd_core.errors import InputError
from nvdd_lj.parameters import BOLTZMANN, Shift, parse_options


def test_built_in_table():
    parameters = parse_options({})
    assert parameters.symbols == ("Ne", "Ar", "Kr", "Xe")
    assert not parameters.wildcard
    assert parameters.sigma[1][1] == 3.405
    assert parameters.epsilon[1][1] == pytest.approx(119.8 * BOLTZMANN)
    assert parameters.epsilon[1][1] == pytest.approx(0.010324, abs=1e-6)
    assert parameters.cutoff == pytest.approx(2.5 * 4.10)
    assert parameters.shift is Shift.NONE


def test_lorentz_berthelot_and_overrides():
    text = {"epsilon.Ar": "0.01", "sigma.Ar": "3.4", "epsilon.Kr": "0.014", "sigma.Kr": "3.6"}
    parameters = parse_options(text)
    assert parameters.symbols == ("Ar", "Kr")
    assert parameters.sigma[0][1] == pytest.approx(3.5)
    assert parameters.epsilon[1][0] == pytest.approx(np.sqrt(0.01 * 0.014))
    assert parameters.cutoff == pytest.approx(9.0)
    changed = parse_options({**text, "epsilon.Kr-Ar": 0.5, "sigma.Ar-Kr": 4.0, "cutoff": "8"})
    assert changed.epsilon[0][1] == changed.epsilon[1][0] == 0.5
    assert changed.sigma[0][1] == changed.sigma[1][0] == 4.0
    assert changed.sigma[0][0] == 3.4
    assert changed.cutoff == 8.0


def test_values_are_completed():
    only_argon = parse_options({"sigma.Ar": 3.405})
    assert only_argon.symbols == ("Ar",)
    assert only_argon.cutoff == pytest.approx(8.5125)
    assert only_argon.epsilon[0][0] == pytest.approx(119.8 * BOLTZMANN)
    pair = parse_options({"epsilon.Ar-Xe": 0.015})
    assert pair.symbols == ("Ar", "Xe")
    assert pair.epsilon[0][1] == 0.015
    same_depth = parse_options({"epsilon": 0.01})
    assert same_depth.symbols == ("Ne", "Ar", "Kr", "Xe")
    assert {value for row in same_depth.epsilon for value in row} == {0.01}


def test_scalars_serve_every_element():
    parameters = parse_options({"epsilon": "1", "sigma": "1", "sigma.Kr": "1.2"})
    assert parameters.wildcard
    lookup = parameters.lookup()
    assert lookup[36] == 0
    assert set(lookup[[0, 1, 18, 118, -1]]) == {1}
    assert parameters.sigma == ((1.2, 1.1), (1.1, 1.0))
    assert parse_options({"epsilon": 1, "sigma": 1}).cutoff == 2.5


def test_nested_tables_as_in_toml():
    flat = parse_options({"epsilon.Ar": 0.01, "epsilon.Ar-Kr": 0.02, "sigma": 3.0})
    assert parse_options({"epsilon": {"Ar": 0.01, "Ar-Kr": 0.02}, "sigma": 3.0}) == flat


def test_coefficients_vanish_at_the_cutoff():
    for shift, vanish in (("none", 0), ("energy", 1), ("force", 2)):
        sigma2, epsilon4, constant, slope = parse_options({"shift": shift}).coefficients()[1, 2]
        rc = parse_options({}).cutoff
        six = (sigma2 / rc**2) ** 3
        energy = epsilon4 * six * (six - 1) + constant + slope * rc
        force = -6 * epsilon4 * six * (2 * six - 1) / rc + slope
        assert (abs(energy) < 1e-15) == (vanish >= 1)
        assert (abs(force) < 1e-15) == (vanish >= 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilonn": 1}, "did you mean epsilon"),
        ({"Sigma": 1}, "did you mean sigma"),
        ({"eps": 1}, "did you mean epsilon"),
        ({"mass": 1}, r"no option 'mass'.*Options: epsilon"),
        ({"cutoff.Ar": 1}, r"cutoff takes no \.Ar"),
        ({"sigma": "wide"}, r"sigma = 'wide' is not a number \(Angstrom\)"),
        ({"sigma": None}, "is not a number"),
        ({"epsilon": True}, "is not a number"),
        ({"sigma": "nan"}, "not finite"),
        ({"cutoff": "inf"}, "not finite"),
        ({"sigma": 0}, "greater than 0"),
        ({"sigma.Ar-Kr": -1}, "greater than 0"),
        ({"cutoff": 0.0}, "greater than 0"),
        ({"epsilon": -0.1}, "must not be negative"),
        ({"shift": "forces"}, "did you mean force"),
        ({"shift": 1}, "none, energy, force"),
        ({"epsilon.ar": 1}, r"'ar', which is no element's symbol .did you mean Ar"),
        ({"epsilon.": 1}, "names 0 elements"),
        ({"sigma": 1e200}, r"sigma = 1e\+200 is too large; give a number \(Angstrom\) up to 1e\+15"),
        ({"epsilon.Ar-Kr-Xe": 1}, "names 3 elements"),
        ({"epsilon.Ar-Kr": 1, "epsilon.Kr-Ar": 2}, "given twice"),
        ({"sigma.Cu": 2.3}, r"Cu is named in the options but has no epsilon; give --option epsilon\.Cu"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_options(options)
    assert caught.value.exit_code == 2


def test_warp_is_quiet():
    code = (
        "import torch; from nvdd_lj.start import start_warp; import sys; start_warp(); start_warp();"
        "print('after', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "after\n"


def test_kernels_go_to_a_temporary_folder_where_the_usual_one_cannot_be_used(tmp_path):
    code = (
        "import torch, warp as wp; from nvdd_lj.start import start_warp; start_warp();"
        "print(wp.config.kernel_cache_dir)"
    )
    names = ("WARP_CACHE_PATH", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"HOME": os.devnull, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.startswith(str(tmp_path / "nvdd-warp-"))
    (note,) = done.stderr.splitlines()
    assert "lj: /dev/null/.cache/warp can't be written to" in note
    (folder,) = tmp_path.glob("nvdd-warp-*")
    assert folder.stat().st_mode & 0o077 == 0
