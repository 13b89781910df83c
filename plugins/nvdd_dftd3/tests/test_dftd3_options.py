"""Options, elements, the data that the package ships, and the specs."""

from __future__ import annotations

import json

import pytest
import torch
from dftd3_cases import evaluate, structures

from nvdd_core.errors import InputError
from nvdd_core.plugins.composition import check_options, options_of
from nvdd_core.runtime import MLIPSpec
from nvdd_core.spec import StrategyKind
from nvdd_dftd3.model import load
from nvdd_dftd3.parameters import CN_CUTOFF, CUTOFF, functional_names, parse_options
from nvdd_dftd3.references import load_tables
from nvdd_dftd3.spec import SPEC_DFTD3_HALO


def test_functionals_by_any_spelling():
    pbe = parse_options({"functional": "pbe"})
    assert (pbe.s6, pbe.s8, pbe.a1, pbe.a2) == (1.0, 0.7875, 0.4289, 4.4407)
    assert (pbe.cutoff, pbe.cn_cutoff) == (CUTOFF, CN_CUTOFF)
    assert parse_options({"functional": "PBE"}) == pbe
    assert parse_options({"functional": "BP86"}) == parse_options({"functional": "bp"})
    assert parse_options({"functional": "CAM-B3LYP"}).a1 == 0.3708
    for name in functional_names():
        assert parse_options({"functional": name}).s8 is not None


def test_all_parameters_are_those_of_s_dftd3():
    """What s-dftd3's own package ships is the truth, functional by functional."""
    parameters = pytest.importorskip("dftd3.parameters")
    theirs = parameters.get_all_damping_params(["bj"])
    assert len(theirs) > 100
    for name, entry in theirs.items():
        given = parse_options({"functional": name})
        assert [getattr(given, key) for key in ("s6", "s8", "a1", "a2")] == [
            entry[key] for key in ("s6", "s8", "a1", "a2")
        ], name


def test_parameters_of_ones_own():
    assert parse_options({"functional": "pbe", "s8": 1.5}).s8 == 1.5
    assert parse_options({"s8": 1, "a1": 0.4, "a2": 5}).s6 == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "functional=NAME"),
        ({"s8": 1.0, "a1": 0.4}, "no a2"),
        ({"functional": "pbesoll"}, "did you mean pbesol"),
        ({"functional": "b3lip"}, "b3lyp"),
        ({"functional": 3}, "3"),
        ({"functional": "pbe", "cutoff": 0.0}, "above 0"),
        ({"functional": "pbe", "cn_cutoff": -1}, "above 0"),
        ({"functional": "pbe", "s8": "x"}, "give a number"),
        ({"functional": "pbe", "s8": float("nan")}, "give a number"),
        ({"functional": "pbe", "s8": True}, "give a number"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(InputError, match=words):
        parse_options(options)


def test_options_are_named_in_the_signature():
    """So that a composition knows whose a bare option is, and a misspelled one is told before the model is loaded."""
    named, others = options_of(load)
    assert set(named) == {"functional", "s6", "s8", "a1", "a2", "cutoff", "cn_cutoff"}
    assert not others
    with pytest.raises(InputError, match=r"option 'cutof'.*cutoff"):
        check_options("dftd3", {"cutof": 3.0}, load)


def test_unknown_element():
    atoms = structures()["rod"]
    atoms.numbers[7] = 104
    with pytest.raises(InputError, match=r"atomic number 104 \(Rf\), atom 7 "):
        evaluate(atoms, cutoff=5.0, cn_cutoff=5.0)
    atoms.numbers[4] = 0
    with pytest.raises(InputError, match=r"atomic number 0 .*atom 4 "):
        evaluate(atoms, cutoff=5.0, cn_cutoff=5.0)


def test_dtype_and_device():
    with pytest.raises(InputError, match="float16"):
        load(dtype=torch.float16, device="cpu", functional="pbe")
    with pytest.raises(InputError, match="meta"):
        load(dtype=torch.float64, device="meta", functional="pbe")


def test_tables():
    tables = load_tables()
    assert tables.cn.shape == (104, 7)
    assert torch.equal(tables.c6, tables.c6.permute(1, 0, 3, 2))
    assert tables.c6[1, 1, 0, 0] == 3.0267  # H2 with H2, as published


@pytest.mark.parametrize("strategy", list(StrategyKind))
def test_specs(strategy):
    model = load(dtype=torch.float64, device=torch.device("cpu"), functional="pbe")
    spec = model.distribution_spec(strategy)
    assert spec.strategy is strategy
    assert set(spec.outputs) == model.outputs
    assert MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert model.distribution_spec(StrategyKind.HALO) == SPEC_DFTD3_HALO
