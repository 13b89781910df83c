"""cuEquivariance's own code on a CPU, behind mace's converter: the same numbers as e3nn's, on ranks too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mace_ranks import Job, compare, joined, oracle

from nvdd_mace.conformance import INTERACTIONS, random_module
from nvdd_mace.model import load

pytest.importorskip(
    "cuequivariance_torch", reason="needs cuequivariance: make conform PLUGIN=mace installs it"
)
OPTIONS = {"backend": "cueq"}
CU_AU = Path(__file__).parents[3] / "examples" / "cu_au" / "cu_au.model"


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[3], INTERACTIONS[5]])
def test_ranks_give_the_numbers_of_e3nn(ranks, made, structures, interaction):
    path, module = made(interaction)
    names = ("rod", "triclinic", "cluster")
    jobs = [Job(structures[name], strategy) for name in names for strategy in ("halo", "wide_halo")]
    shares = ranks(2, "evaluate", path, OPTIONS, jobs)
    for place, job in enumerate(jobs):
        compare(joined([rank[place] for rank in shares]), oracle(module, job.atoms))


def differences(path, **options):
    """What is told of forces when a file is loaded, and the largest difference."""
    with pytest.warns(UserWarning, match="forces by cueq differ by at most") as told:
        load(dtype=torch.float64, device="cpu", checkpoint=str(path), **OPTIONS, **options)
    (text,) = [str(w.message) for w in told if "forces by cueq" in str(w.message)]
    return text, float(text.split("at most ")[1].split()[0])


def test_repulsion_has_all_its_digits(made):
    """The converter makes mace's own part anew, which depends on torch's default dtype."""
    path, _ = made(pair_repulsion=True, distance_transform="Agnesi")
    assert differences(path, trust=True)[1] < 1e-12


@pytest.mark.parametrize("interaction", [INTERACTIONS[1], INTERACTIONS[3], INTERACTIONS[5]])
def test_an_earlier_model_of_float32_leaves_no_coefficients(made, interaction):
    """cuEquivariance keeps coefficients in the dtype of whoever asked first, for the whole process."""
    path, _ = made(interaction)
    random_module(interaction, dtype=torch.float32)
    load(dtype=torch.float32, device="cpu", checkpoint=path, **OPTIONS)
    assert differences(path)[1] < 1e-14


@pytest.mark.parametrize("trust", [False, True])
def test_a_file_made_in_float32(trust):
    """Its coupling coefficients are rounded; cuEquivariance has its own."""
    text, off = differences(CU_AU, trust=trust)
    assert 1e-9 < off < 1e-6
    assert text.endswith(
        "the file was made in float32 and has constants of it, cueq makes its own in float64"
    )


@pytest.mark.parametrize("trust", [False, True])
def test_a_file_made_without_cuequivariance(tmp_path, structures, trust):
    """mace notes the coupling basis that was asked for, not the one it made without cuEquivariance at hand."""
    module = random_module(correlation=3, use_reduced_cg=False)
    module.use_reduced_cg = True
    path = tmp_path / "elsewhere.model"
    torch.save(module, path)
    assert differences(path, trust=trust)[1] < 1e-12
