"""Names of several models in one, and which of them an option is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvdd_core.errors import InputError
from nvdd_core.plugins.composition import Term, is_composition, read_model, shared_out


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("lj", [("lj", "lj", 1.0)]),
        ("mace+dftd3", [("mace", "mace", 1.0), ("dftd3", "dftd3", 1.0)]),
        ("mace+0.5*dftd3", [("mace", "mace", 1.0), ("dftd3", "dftd3", 0.5)]),
        (" lj + -1.5 * lj+lj", [("lj", "lj", 1.0), ("lj2", "lj", -1.5), ("lj3", "lj", 1.0)]),
        ("1e+2*lj+2.5e-3*pme", [("lj", "lj", 100.0), ("pme", "pme", 0.0025)]),
        ("lj2+lj+lj", [("lj2", "lj2", 1.0), ("lj", "lj", 1.0), ("lj3", "lj", 1.0)]),
        ("0.5*lj", [("lj", "lj", 0.5)]),
        ("a/lj+b/lj", [("lj", "a/lj", 1.0), ("lj2", "b/lj", 1.0)]),
        ("some.where:load+2*lj", [("load", "some.where:load", 1.0), ("lj", "lj", 2.0)]),
        ("e-3+le+4", [("e-3", "e-3", 1.0), ("le", "le", 1.0), ("4", "4", 1.0)]),
    ],
)
def test_terms(text: str, terms: list[tuple[str, str, float]]) -> None:
    assert read_model(text) == tuple(Term(*term) for term in terms)


@pytest.mark.parametrize(
    "text", ["lj", "pkg.mod:load", "/tmp/a+b/file.py:load", "a+b.py:load", "c++/model.py:make"]
)
def test_other_names_are_left_alone(text: str) -> None:
    assert not is_composition(text)
    assert read_model(text) == (Term(text, text),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lj+", "'' is no model"),
        ("lj++pme", "'' is no model"),
        ("half*lj+pme", "the weight 'half' is no finite number"),
        ("inf*lj", "the weight 'inf'"),
        ("*lj", "the weight ''"),
        ("lj*0.5+pme", "'0.5'|weight 'lj'"),
    ],
)
def test_mistakes_are_told(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_model(text)


def _mace(*, dtype: Any, device: Any, checkpoint: str = "", head: str = "") -> None: ...


def _d3(*, dtype: Any, device: Any, functional: str, head: float = 1.0) -> None: ...


def _open(*, dtype: Any, device: Any, **options: Any) -> None: ...


LOADERS = {"mace": _mace, "dftd3": _d3}
TERMS = read_model("mace+dftd3")


def test_an_option_goes_to_the_member_that_takes_it() -> None:
    options = {"checkpoint": "x", "dftd3.functional": "pbe", "mace.head": "a", "dftd3.head": 2.0}
    assert shared_out(TERMS, options, LOADERS) == {
        "mace": {"checkpoint": "x", "head": "a"},
        "dftd3": {"functional": "pbe", "head": 2.0},
    }
    table = {"mace": {"checkpoint": "x"}, "functional": "pbe"}
    assert shared_out(TERMS, table, LOADERS) == {"mace": {"checkpoint": "x"}, "dftd3": {"functional": "pbe"}}


def test_a_member_with_a_longer_name_comes_first_and_options_may_have_dots() -> None:
    terms = (Term("lj", "lj"), Term("lj.fast", "lj.fast"))
    loaders = {"lj": _open, "lj.fast": _open}
    dealt = shared_out(terms, {"lj.epsilon.Ar": 1.0, "lj.fast.cutoff": 2.0}, loaders)
    assert dealt == {"lj": {"epsilon.Ar": 1.0}, "lj.fast": {"cutoff": 2.0}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "a"}, r"option 'head' could be for 'mace' and 'dftd3': write mace\.head or dftd3\.head"),
        (
            {"functionl": "a"},
            r"no member of mace\+dftd3 has an option 'functionl' \(did you mean dftd3\.functional",
        ),
        ({"dtype": "a"}, "give --dtype"),
        ({"checkpoint": "a", "mace.checkpoint": "b"}, "option 'checkpoint' of member 'mace' is given twice"),
        ({"mace": {"head": "a"}, "mace.head": "b"}, "'mace.head' is given twice"),
    ],
)
def test_options_that_fit_nobody_or_several(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shared_out(TERMS, options, LOADERS)


def _pairs(*, dtype: Any, device: Any, cutoff: float = 1.0, **pairs: Any) -> None: ...


def test_a_loader_that_takes_anything_could_take_it() -> None:
    with pytest.raises(InputError, match="could be for 'mace' and 'lj'"):
        shared_out(read_model("mace+lj"), {"checkpoint": "x"}, {"mace": _mace, "lj": _open})
    dealt = shared_out(
        read_model("mace+lj"),
        {"checkpoint": "x", "epsilon.Ar": 1.0, "cutoff": 2.0},
        {"mace": _mace, "lj": _pairs},
    )
    assert dealt == {"mace": {"checkpoint": "x"}, "lj": {"epsilon.Ar": 1.0, "cutoff": 2.0}}


def test_nothing_heavy_is_imported() -> None:
    import nvdd_core.plugins.composition as module

    assert "torch" not in Path(module.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [{"mce.checkpoint": "x"}, {"mce": {"checkpoint": "x"}}])
def test_a_slip_in_the_name_of_a_member_is_told(options: dict[str, Any]) -> None:
    with pytest.raises(
        InputError, match=r"there is no member 'mce' \(did you mean mace\?\); the members: mace, lj"
    ):
        shared_out(read_model("mace+lj"), options, {"mace": _mace, "lj": _open})
