"""Checks of distribution specs: data that merges, travels and can't change.

Each is a function of one spec that raises `ConformanceError`. Layer: testing.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from nvdd_core.errors import SpecError
from nvdd_core.runtime import SPEC_MPNN_GP, SPEC_MPNN_HALO, SPEC_MPNN_WIDE, MLIPSpec
from nvdd_core.spec import SpecData, StrategyKind
from nvdd_core.testing.failures import ConformanceError, check
from nvdd_core.testing.process import run_fresh

PRESETS: Final = {
    StrategyKind.HALO: SPEC_MPNN_HALO,
    StrategyKind.GRAPH_PARTITION: SPEC_MPNN_GP,
    StrategyKind.WIDE_HALO: SPEC_MPNN_WIDE,
}
_UNKNOWN: Final = "nvdd_no_such_key"


def _same(what: str, found: object, expected: SpecData) -> None:
    if type(found) is not type(expected) or found != expected:
        raise ConformanceError(f"{what} gives another spec: found {found!r}, expected {expected!r}")
    if isinstance(found, SpecData) and found.given != expected.given:
        raise ConformanceError(
            f"{what} forgets which fields the author named: found {sorted(found.given)}, expected "
            f"{sorted(expected.given)}"
        )


@check
def assert_spec_round_trip(spec: SpecData) -> None:
    """Check that a spec survives ``to_dict``, JSON text and a file."""
    kind = type(spec)
    _same("from_dict(to_dict(spec))", kind.from_dict(spec.to_dict()), spec)
    text = json.dumps(spec.to_dict())
    _same("from_dict of its JSON text", kind.from_dict(json.loads(text)), spec)
    with tempfile.TemporaryDirectory(prefix="nvdd-conformance-") as folder:
        path = Path(folder, "spec.json")
        spec.save(path)
        _same("save and load", kind.load(path), spec)


@check
def assert_spec_is_frozen(spec: SpecData) -> None:
    """Check that no field can be set, and that equal specs have equal hashes."""
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        try:
            spec.__setattr__(field.name, value)
        except (AttributeError, TypeError):  # FrozenInstanceError is an AttributeError
            continue
        raise ConformanceError(
            f"{type(spec).__name__}.{field.name} can be set; declare the class with @dataclass(frozen=True)"
        )
    if hash(spec) != hash(copy.deepcopy(spec)):
        raise ConformanceError(f"a copy of the {type(spec).__name__} has another hash than the original")


@check
def assert_spec_can_be_copied(spec: SpecData) -> None:
    """Check that a spec survives pickle and deepcopy."""
    _same("pickle", pickle.loads(pickle.dumps(spec)), spec)
    _same("copy.deepcopy", copy.deepcopy(spec), spec)


@check
def assert_spec_merge_is_lossless(spec: MLIPSpec) -> None:
    """Check that nothing that a spec names gets lost when it is merged onto the core's preset, or with itself."""
    preset = PRESETS[spec.strategy]
    _kept("preset | spec", preset | spec, spec)
    _same("spec | empty", spec | type(spec)(), spec)
    _same("spec | spec", spec | spec, spec)


def _kept(where: str, merged: Any, spec: Any) -> None:
    """Check that `merged` still has everything that `spec` names, at every depth."""
    if isinstance(spec, SpecData) and isinstance(merged, SpecData) and type(spec) is type(merged):
        for name in spec.given:
            _kept(f"{where}.{name}", getattr(merged, name), getattr(spec, name))
    elif isinstance(spec, Mapping):
        for key, value in spec.items():
            if key not in merged:
                raise ConformanceError(f"{where}: the entry {key!r} is lost")
            _kept(f"{where}[{key!r}]", merged[key], value)
    elif isinstance(spec, tuple):
        for item in spec:
            if item not in merged:
                raise ConformanceError(f"{where}: {item!r} is lost")
    elif merged != spec:
        raise ConformanceError(f"{where}: found {merged!r}, expected {spec!r}")


@check
def assert_spec_refuses_unknown_keys(spec: SpecData) -> None:
    """Check that an unknown key, at the top and inside, and an unknown version are refused."""
    data = spec.to_dict()
    bad = {"an unknown key": {**data, _UNKNOWN: 1}, "an unknown version": {**data, "version": 10**6}}
    bad["no version"] = {name: value for name, value in data.items() if name != "version"}
    for name, inner in data.items():
        if isinstance(inner, dict) and isinstance(getattr(spec, name, None), SpecData):
            bad[f"an unknown key in '{name}'"] = {**data, name: {**inner, _UNKNOWN: 1}}
    for what, changed in bad.items():
        try:
            type(spec).from_dict(changed)
        except SpecError:
            continue
        raise ConformanceError(
            f"{type(spec).__name__}.from_dict accepts {what}; it has to raise SpecError, or a slip goes unseen"
        )


@check
def assert_specs_reach_workers(specs: Sequence[SpecData]) -> None:
    """Check that specs reach a newly started process, pickled and as JSON, and come back equal."""
    texts = [json.dumps(spec.to_dict()) for spec in specs]
    answers = run_fresh(f"{__name__}:_echo", [(type(spec), spec) for spec in specs], texts)
    for spec, (pickled, read) in zip(specs, answers, strict=True):
        _same("a worker process, pickled", pickled, spec)
        _same("a worker process, as JSON", read, spec)


def _echo(specs: list[tuple[type[SpecData], SpecData]], texts: list[str]) -> list[tuple[SpecData, SpecData]]:
    """Return each spec as it arrived and as read from its JSON text; runs in the worker."""
    return [(spec, kind.from_dict(json.loads(text))) for (kind, spec), text in zip(specs, texts, strict=True)]
