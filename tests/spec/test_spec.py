"""Specs: merging, replacing, JSON round trips, files, refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from nvdd_core.errors import SpecError
from nvdd_core.runtime.mlip_spec import (
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_MPNN_WIDE,
    UNDECLARED,
    ForceStrategy,
    MLIPSpec,
)
from nvdd_core.spec import (
    CompilePolicy,
    DistributionSpec,
    FrozenMap,
    GatherMode,
    HaloStorage,
    OutputKind,
    OutputSpec,
    Reduce,
    ReplicatedStorage,
    ScatterMode,
    ShardedStorage,
    SpecData,
    StorageKind,
    StrategyKind,
    adapter_kinds,
    register_adapter_kind,
)
from nvdd_core.tensor import DispatchSpec


@dataclass(frozen=True)
class Adapter:
    """The least that a spec can carry as an adapter."""

    name: str
    positions: tuple[int, ...] = ()
    kind: str = field(default="test", init=False)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "positions": list(self.positions)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Adapter:
        return cls(data["name"], tuple(data["positions"]))


@pytest.fixture(autouse=True)
def _kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_kinds, "_READERS", {})
    register_adapter_kind("test", Adapter.from_dict)


def _maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields, as keyword arguments."""
    return st.fixed_dictionaries({}, optional=fields)


adapters = st.lists(st.builds(Adapter, st.sampled_from(["a", "b", "c"]), st.just((0, 1))), unique=True).map(
    tuple
)
halos = _maybe(
    scatter=st.sampled_from([ScatterMode.LOCAL, ScatterMode.REFRESH]), gather=st.sampled_from(GatherMode)
).map(lambda k: HaloStorage(**k))
distributions = _maybe(
    strategy=st.sampled_from(StrategyKind),
    storage=st.one_of(halos, st.just(ShardedStorage()), st.just(ReplicatedStorage())),
    system_reductions=st.booleans(),
    custom_ops=adapters,
    third_party_helpers=adapters,
).map(lambda k: DistributionSpec(**k))
outputs = _maybe(kind=st.sampled_from(OutputKind), reduce=st.sampled_from(Reduce)).map(
    lambda k: OutputSpec(**k)
)
policies = _maybe(
    supported=st.booleans(), backend=st.sampled_from(["inductor", "eager"]), growth=st.floats(1.01, 8.0)
).map(lambda k: CompilePolicy(**k))
specs = _maybe(
    distribution=distributions,
    outputs=st.dictionaries(st.sampled_from(["energy", "stress", "charges"]), outputs),
    force_strategy=st.sampled_from(ForceStrategy),
    compile_policy=policies,
).map(lambda k: MLIPSpec(**k))

CLASSES = [
    HaloStorage,
    ShardedStorage,
    ReplicatedStorage,
    OutputSpec,
    CompilePolicy,
    DistributionSpec,
    MLIPSpec,
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_reader(cls: type[SpecData]) -> None:
    assert list(cls.READERS) == [f.name for f in dataclasses.fields(cls)]


# -- round trips --------------------------------------------------------------------------------------------------


@given(specs)
def test_json_round_trip(spec: MLIPSpec) -> None:
    back = MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert back == spec
    assert hash(back) == hash(spec)
    assert back.given == spec.given
    assert back.distribution.given == spec.distribution.given


@given(specs, specs)
def test_a_spec_means_the_same_after_travelling(a: MLIPSpec, b: MLIPSpec) -> None:
    for travelled in (
        MLIPSpec.from_dict(b.to_dict()),
        pickle.loads(pickle.dumps(b)),
        copy.deepcopy(b),
        copy.copy(b),
        b.replace(),
    ):
        assert a | travelled == a | b


@pytest.mark.parametrize("spec", [SPEC_MPNN_HALO, SPEC_MPNN_GP, SPEC_MPNN_WIDE])
def test_presets_round_trip(spec: MLIPSpec, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    spec.save(path)
    assert MLIPSpec.load(path) == spec == pickle.loads(pickle.dumps(spec))
    assert [p.name for p in tmp_path.iterdir()] == ["spec.json"]


def test_json_form() -> None:
    """The written form is public: names and words change only with the version."""
    spec = MLIPSpec(
        distribution=DistributionSpec(
            StrategyKind.GRAPH_PARTITION,
            HaloStorage(gather=GatherMode.LOCAL),
            custom_ops=(Adapter("a", (1,)),),
        ),
        outputs={"stress": OutputSpec(OutputKind.PER_GRAPH, Reduce.ALL_REDUCE)},
    )
    assert spec.to_dict() == {
        "version": 1,
        "distribution": {
            "strategy": "graph_partition",
            "storage": {"type": "halo", "scatter": "local", "gather": "local", "given": ["gather"]},
            "system_reductions": False,
            "custom_ops": [{"kind": "test", "name": "a", "positions": [1]}],
            "third_party_helpers": [],
            "given": ["custom_ops", "storage", "strategy"],
        },
        "outputs": {"stress": {"kind": "per_graph", "reduce": "all_reduce"}},
        "force_strategy": "autograd",
        "compile_policy": {
            "supported": False,
            "backend": "inductor",
            "fullgraph": True,
            "growth": 1.25,
            "capture": False,
            "pads": False,
            "given": [],
        },
        "given": ["distribution", "outputs"],
    }


def test_a_file_may_name_only_what_differs() -> None:
    spec = MLIPSpec.from_dict({"version": 1, "distribution": {"system_reductions": True}})
    assert spec == MLIPSpec(distribution=DistributionSpec(system_reductions=True))
    assert (SPEC_MPNN_HALO | spec).distribution.storage == SPEC_MPNN_HALO.distribution.storage


# -- refusals --------------------------------------------------------------------------------------------------------

BODY = SPEC_MPNN_HALO.to_dict()


def _changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(BODY)
    *parents, last = path.split(".")
    node = data
    for name in parents:
        node = node[name]
    node[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_changed("forces", 1), r"MLIPSpec: unknown key 'forces'; known keys are distribution, outputs"),
        (_changed("distribution.halo", 1), "MLIPSpec.distribution: unknown key 'halo'"),
        (_changed("distribution.storage.mode", 1), "MLIPSpec.distribution.storage: unknown key 'mode'"),
        (_changed("outputs.energy.sum", 1), r"MLIPSpec.outputs\['energy'\]: unknown key 'sum'"),
        (_changed("version", 2), "version 2 found, this nvdd reads 1"),
        (_changed("version", True), "version True"),
        ({k: v for k, v in BODY.items() if k != "version"}, "no 'version' found"),
        (
            _changed("force_strategy", "magic"),
            "MLIPSpec.force_strategy: expected one of 'autograd', 'direct'",
        ),
        (_changed("distribution.storage.type", "cloud"), "storage.type: expected one of 'halo', 'sharded'"),
        (_changed("distribution.system_reductions", "yes"), "system_reductions: expected bool, found 'yes'"),
        (_changed("distribution.custom_ops", {}), "custom_ops: expected a list"),
        (
            _changed("distribution.custom_ops", [{"kind": "warp"}]),
            r"custom_ops\[0\].kind: adapter kind 'warp'",
        ),
        (_changed("distribution.custom_ops", [3]), r"custom_ops\[0\]: expected an adapter"),
        (_changed("compile_policy.growth", True), "growth: expected int or float, found True"),
        (_changed("compile_policy.growth", 1.0), "growth: expected a finite factor above 1"),
        (_changed("outputs", []), "outputs: expected an object"),
        (_changed("given", ["nothing"]), "MLIPSpec.given: expected a list of field names"),
        ([], "MLIPSpec: expected an object"),
    ],
)
def test_data_that_is_no_spec_is_refused(data: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MLIPSpec.from_dict(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read as a spec"),
        (b"{", "not a JSON file"),
        (b"\xff", "not a JSON file"),
        (b"{}", "no 'version'"),
    ],
)
def test_files_that_are_no_spec_are_refused(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(SpecError, match=rf"spec\.json: .*{message}"):
        MLIPSpec.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spec.json"
    SPEC_MPNN_HALO.save(path)

    def fail(source: str, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(SpecError, match=r"spec\.json: the spec can't be written: disk full"):
        SPEC_MPNN_GP.save(path)
    assert MLIPSpec.load(path) == SPEC_MPNN_HALO
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DistributionSpec(strategy="halo2"), "DistributionSpec.strategy: expected one of 'halo'"),  # type: ignore[arg-type]
        (lambda: DistributionSpec(storage="halo"), "DistributionSpec.storage: expected HaloStorage or"),  # type: ignore[arg-type]
        (lambda: DistributionSpec(system_reductions=1), "expected bool, found 1"),  # type: ignore[arg-type]
        (lambda: DistributionSpec(custom_ops=("a",)), "expected a tuple of adapters"),  # type: ignore[arg-type]
        (lambda: MLIPSpec(outputs={"energy": "sum"}), r"outputs\['energy'\]: expected an OutputSpec"),  # type: ignore[dict-item]
        (lambda: MLIPSpec(outputs=["energy"]), "MLIPSpec.outputs: expected Mapping"),  # type: ignore[arg-type]
        (lambda: SPEC_MPNN_HALO.replace(force=1), "MLIPSpec has no field 'force'; its fields are"),
        (
            lambda: DistributionSpec(StrategyKind.WIDE_HALO, HaloStorage(ScatterMode.HALO_CORRECTION)),
            "count them twice",
        ),
    ],
)
def test_fields_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_words_are_accepted_for_enums() -> None:
    assert HaloStorage(scatter="refresh").scatter is ScatterMode.REFRESH  # type: ignore[arg-type]
    assert OutputSpec("per_node", "owned_only") == OutputSpec(OutputKind.PER_NODE, Reduce.OWNED_ONLY)  # type: ignore[arg-type]


# -- merging --------------------------------------------------------------------------------------------------------


@given(specs, specs, specs)
def test_merging_laws(a: MLIPSpec, b: MLIPSpec, c: MLIPSpec) -> None:
    assert a | a == a
    assert a | MLIPSpec() == a
    if len({type(s.distribution.storage) for s in (a, b, c)}) == 1:
        assert (a | b) | c == a | (b | c)
    merged = a | b
    for name in ("force_strategy",):
        assert getattr(merged, name) == getattr(b if name in b.given else a, name)
    for name in a.outputs.keys() | b.outputs.keys():
        assert name in merged.outputs
    for spec in (a, b):
        assert set(spec.distribution.custom_ops) <= set(merged.distribution.custom_ops)


def test_a_preset_keeps_what_an_override_leaves_unnamed() -> None:
    spec = SPEC_MPNN_HALO | MLIPSpec(
        distribution=DistributionSpec(
            storage=HaloStorage(scatter=ScatterMode.LOCAL), custom_ops=(Adapter("a"),)
        ),
        outputs={"charges": OutputSpec(OutputKind.PER_NODE)},
    )
    assert spec.distribution.storage == HaloStorage(ScatterMode.LOCAL, GatherMode.REFRESH)
    assert set(spec.outputs) == {"energy", "forces", "stress", "node_energy", "charges"}
    assert spec.distribution.custom_ops == (Adapter("a"),)
    more = spec | MLIPSpec(distribution=DistributionSpec(custom_ops=(Adapter("a"), Adapter("b"))))
    assert more.distribution.custom_ops == (Adapter("a"), Adapter("b"))


def test_an_override_can_set_a_field_back_to_its_default() -> None:
    base = DistributionSpec(system_reductions=True, strategy=StrategyKind.GRAPH_PARTITION)
    assert (base | DistributionSpec(system_reductions=False)).system_reductions is False
    assert (base | DistributionSpec(system_reductions=False)).strategy is StrategyKind.GRAPH_PARTITION


def test_replace_changes_one_field_and_keeps_the_rest() -> None:
    spec = SPEC_MPNN_HALO.replace(force_strategy=ForceStrategy.DIRECT)
    assert spec.outputs == SPEC_MPNN_HALO.outputs
    assert spec.distribution == SPEC_MPNN_HALO.distribution
    assert (SPEC_MPNN_GP | spec.replace(outputs={})).force_strategy is ForceStrategy.DIRECT


def test_different_classes_do_not_merge() -> None:
    with pytest.raises(TypeError):
        _ = DistributionSpec() | OutputSpec()
    assert (DistributionSpec(storage=HaloStorage()) | DistributionSpec(storage=ShardedStorage())).storage == (
        ShardedStorage()
    )


# -- what specs say -----------------------------------------------------------------------------------------------


def test_rules_for_the_dispatch() -> None:
    rules = SPEC_MPNN_HALO.dispatch_rules
    assert isinstance(SPEC_MPNN_HALO, DispatchSpec)
    assert isinstance(SPEC_MPNN_HALO.distribution, DispatchSpec)
    assert (rules.storage, rules.scatter, rules.system_reductions) == (
        StorageKind.HALO,
        ScatterMode.HALO_CORRECTION,
        False,
    )
    assert DistributionSpec(storage=ShardedStorage()).dispatch_rules.storage is StorageKind.SHARDED
    assert SPEC_MPNN_WIDE.dispatch_rules.scatter is ScatterMode.LOCAL
    assert [s.strategy for s in (SPEC_MPNN_HALO, SPEC_MPNN_GP, SPEC_MPNN_WIDE)] == list(StrategyKind)


@pytest.mark.parametrize(
    ("kind", "reduce", "combined"),
    [
        (OutputKind.PER_NODE, Reduce.NONE, Reduce.OWNED_ONLY),
        (OutputKind.PER_GRAPH, Reduce.NONE, Reduce.ALL_REDUCE),
        (OutputKind.GLOBAL, Reduce.NONE, Reduce.NONE),
        (OutputKind.UNKNOWN, Reduce.NONE, Reduce.NONE),
        (OutputKind.PER_GRAPH, Reduce.OWNED_ONLY, Reduce.OWNED_ONLY),
        (OutputKind.PER_NODE, Reduce.ALL_REDUCE, Reduce.ALL_REDUCE),
    ],
)
def test_rule_in_force_for_an_output(kind: OutputKind, reduce: Reduce, combined: Reduce) -> None:
    assert OutputSpec(kind, reduce).combined is combined
    assert MLIPSpec().output("anything") is UNDECLARED


def test_specs_cannot_change() -> None:
    outputs_ = {"energy": OutputSpec(OutputKind.PER_GRAPH)}
    spec = MLIPSpec(outputs=outputs_)
    outputs_["energy"] = OutputSpec()
    assert spec.output("energy").kind is OutputKind.PER_GRAPH
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.force_strategy = ForceStrategy.DIRECT  # type: ignore[misc]
    with pytest.raises(TypeError):
        spec.outputs["energy"] = OutputSpec()  # type: ignore[index]


def test_frozen_map() -> None:
    m = FrozenMap({"a": 1, "b": 2})
    assert m == {"b": 2, "a": 1}
    assert hash(m) == hash(FrozenMap({"b": 2, "a": 1}))
    assert (len(m), list(m), m != 3, repr(m)) == (2, ["a", "b"], True, "FrozenMap({'a': 1, 'b': 2})")


def test_one_reader_per_kind() -> None:
    register_adapter_kind("other", Adapter.from_dict)
    register_adapter_kind("other", Adapter.from_dict)
    with pytest.raises(ValueError, match="'test' has a reader already"):
        register_adapter_kind("test", lambda data: Adapter("x"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1.0}, "version 1.0 found"),
        ({"version": [1]}, r"version \[1\] found"),
        ({"distribution": {"storage": {"type": ["x"]}}}, r"storage.type: expected one of .* found \['x'\]"),
        ({"distribution": {"storage": {"type": {}}}}, "storage.type: expected one of"),
        ({"given": ["distribution"]}, "given: names 'distribution', for which there is no value"),
        ({"distribution": {"given": ["storage"]}}, r"distribution.given: names 'storage'"),
    ],
)
def test_what_no_spec_is(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        MLIPSpec.from_dict({"version": 1, **change})


def test_a_spec_that_can_not_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the spec can't be written: No such file"):
        SPEC_MPNN_HALO.save(tmp_path / "none" / "spec.json")


def test_a_file_nested_without_end_is_no_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("[" * 200_000)
    with pytest.raises(SpecError, match=r"spec\.json: "):
        MLIPSpec.load(path)
