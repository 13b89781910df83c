"""Rows are checked when they are built, and building them imports nothing."""

from __future__ import annotations

import dataclasses
import fractions
import pickle

import pytest

from nvdd_core.errors import PluginValidationError
from nvdd_core.plugins import AdapterDecl, ModelDecl, PluginInfo, Ref, SpecDecl

REF = Ref("fractions:Fraction")


@pytest.mark.parametrize("text", ["a:b", "a.b:c.d", "_x._y:_z", "a1:b2"])
def test_ref_accepts(text: str) -> None:
    assert str(Ref(text)) == text


@pytest.mark.parametrize(
    "text", ["", "a", "a.b", ":b", "a:", "a b:c", "a-b:c", "a:b:c", "a..b:c", "1a:b", None, 3]
)
def test_ref_refuses(text: object) -> None:
    with pytest.raises(PluginValidationError, match=r"package\.module:attribute"):
        Ref(text)  # type: ignore[arg-type]


def test_ref_imports_on_resolve_only() -> None:
    ref = Ref("no_such_module_abc:thing")
    assert ref.module == "no_such_module_abc"
    with pytest.raises(ModuleNotFoundError):
        ref.resolve()
    assert REF.resolve() is fractions.Fraction
    assert Ref("fractions:Fraction.from_float").resolve() == fractions.Fraction.from_float


@pytest.mark.parametrize("name", ["lj", "mace-mp-0", "a1.b_c"])
def test_model_names(name: str) -> None:
    assert ModelDecl(name, REF).name == name


@pytest.mark.parametrize(
    ("row", "arguments", "part"),
    [
        (ModelDecl, {"name": "Upper", "ref": REF}, "name"),
        (ModelDecl, {"name": "a/b", "ref": REF}, "name"),
        (ModelDecl, {"name": 3, "ref": REF}, "name"),
        (ModelDecl, {"name": "a", "ref": "fractions:Fraction"}, "Ref"),
        (ModelDecl, {"name": "a", "ref": REF, "spec": "not a spec"}, "spec"),
        (ModelDecl, {"name": "a", "ref": REF, "maturity": "great"}, "experimental, stable, deprecated"),
        (ModelDecl, {"name": "a", "ref": REF, "requires": "numpy>=1"}, "tuple"),
        (ModelDecl, {"name": "a", "ref": REF, "requires": (1,)}, "strings"),
        (ModelDecl, {"name": "a", "ref": REF, "requires": None}, "tuple"),
        (ModelDecl, {"name": "a", "ref": REF, "paths": "checkpoint"}, "paths must be a tuple"),
        (ModelDecl, {"name": "a", "ref": REF, "paths": (1,)}, "paths must be a tuple"),
        (SpecDecl, {"name": "1", "ref": REF}, "name"),
        (SpecDecl, {"name": "S", "ref": REF, "title": 1}, "title"),
        (AdapterDecl, {"name": "x", "kind": "op", "target": "t", "ref": REF}, "name"),
        (AdapterDecl, {"name": "p/x", "kind": "opp", "target": "t", "ref": REF}, "kind"),
        (AdapterDecl, {"name": "p/x", "kind": "op", "target": None, "ref": REF}, "target"),
        (PluginInfo, {"api": 1, "maturity": ""}, "maturity"),
        (PluginInfo, {"api": 1, "requires": "numpy"}, "requires"),
    ],
)
def test_rows_refuse(row, arguments, part: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PluginValidationError, match=part):
        row(**arguments)


def test_rows_are_values() -> None:
    decl = ModelDecl("a", REF, requires=["numpy"])  # type: ignore[arg-type]
    assert decl.requires == ("numpy",)
    assert pickle.loads(pickle.dumps(decl)) == decl
    assert hash(decl) == hash(ModelDecl("a", REF, requires=("numpy",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        decl.name = "b"  # type: ignore[misc]
