"""Adapters as data: equality, hashing, pickling, JSON inside specs, merging."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvdd_core.adapters import (
    FunctionAdapter,
    JitAdapter,
    MethodAdapter,
    ModuleHookAdapter,
    OpAdapter,
    PythonAdapter,
)
from nvdd_core.errors import SpecError
from nvdd_core.plugins.rows import Ref
from nvdd_core.runtime.mlip_spec import SPEC_MPNN_HALO, MLIPSpec
from nvdd_core.spec import DistributionSpec
from tests.adapters import foreign
from tests.adapters.ops import both
from tests.adapters.replacements import add_one, double_input, plus_ten

OP = OpAdapter(
    both, gather_inputs=[0], owned_slice_inputs=[1], scatter_outputs=[0], all_reduce_replicated_outputs=[1]
)
ADAPTERS = [
    OP,
    OpAdapter("ns::later.out", gather_inputs_full=[0], slice_outputs_owned=[0], install_site="here"),
    MethodAdapter(foreign.Block, "forward", plus_ten),
    FunctionAdapter(foreign.scale, plus_ten),
    PythonAdapter(foreign, "LIMIT", [1, {"a": 2.5}, None]),
    PythonAdapter(foreign.Block, "rate", plus_ten),
    JitAdapter(foreign.scripted, "eager", original=plus_ten),
    JitAdapter("tests.adapters.foreign:Scripted.forward", row_outputs=(0, 2)),
    ModuleHookAdapter("layers.*:Linear", double_input, add_one, install_site="there"),
]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_round_trips(adapter: Any) -> None:
    text = json.dumps(adapter.to_dict())
    assert json.loads(text)["version"] == 1
    for again in (
        type(adapter).from_dict(json.loads(text)),
        pickle.loads(pickle.dumps(adapter)),
        copy.deepcopy(adapter),
    ):
        assert again == adapter
        assert hash(again) == hash(adapter)
        assert again.install_site == adapter.install_site
        assert again.to_dict() == adapter.to_dict()
        assert again.describe().to_dict() == adapter.describe().to_dict()


def test_inside_a_spec() -> None:
    spec = SPEC_MPNN_HALO | MLIPSpec(
        distribution=DistributionSpec(custom_ops=tuple(ADAPTERS[:2]), third_party_helpers=tuple(ADAPTERS[2:]))
    )
    again = MLIPSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    merged = spec | MLIPSpec(
        distribution=DistributionSpec(
            custom_ops=(OpAdapter("toy::other"), copy.deepcopy(OP)), third_party_helpers=(ADAPTERS[3],)
        )
    )
    assert merged.distribution.custom_ops == (*ADAPTERS[:2], OpAdapter("toy::other"))
    assert merged.distribution.third_party_helpers == tuple(ADAPTERS[2:])


def test_object_and_name_are_one() -> None:
    by_name = MethodAdapter("tests.adapters.foreign:Block", "forward", "tests.adapters.replacements:plus_ten")
    assert by_name == ADAPTERS[2]
    assert PythonAdapter(foreign.Block, "rate", Ref("tests.adapters.replacements:plus_ten")) == ADAPTERS[5]
    assert PythonAdapter("tests.adapters.foreign", "LIMIT", 1) != PythonAdapter(foreign, "LIMIT", 2)
    memento = ADAPTERS[3].install()
    try:
        assert FunctionAdapter(foreign.scale, plus_ten) == ADAPTERS[3]  # while it is wrapped
    finally:
        ADAPTERS[3].restore(memento)


NAN = float("nan")
ROWS = torch.arange(3.0)


@pytest.mark.parametrize(
    ("one", "two", "equal"),
    [
        (1, True, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (NAN, float("nan"), True),
        ([1, 2], [1, 2], True),
        ([1, 2], [True, 2], False),
        ([1], (1,), False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        ({1: 0}, {True: 0}, False),
        (ROWS, ROWS, True),
        (ROWS, ROWS.clone(), True),
        (ROWS, ROWS + 1, False),
        (ROWS, ROWS.double(), False),
        (torch.ones(1), torch.ones(1, 1), False),
        (ROWS.numpy(), ROWS.numpy().copy(), True),
        ([ROWS], [ROWS + 1], False),
    ],
)
def test_values_are_compared_with_their_types(one: Any, two: Any, equal: bool) -> None:
    a, b = PythonAdapter(foreign, "LIMIT", one), PythonAdapter(foreign, "LIMIT", two)
    assert (a == b) is (b == a) is equal
    assert hash(a) == hash(b)
    merged = DistributionSpec(third_party_helpers=(a,)) | DistributionSpec(third_party_helpers=(b,))
    assert len(merged.third_party_helpers) == (1 if equal else 2)


def test_code_without_a_name() -> None:
    def local(original: Any, *args: Any) -> Any:
        return original(*args)

    one, two = (FunctionAdapter(foreign.scale, lambda original, x: x) for _ in range(2))
    assert one != two
    assert one == copy.copy(one)
    for adapter in (
        one,
        MethodAdapter(foreign.Block, "forward", local),
        ModuleHookAdapter("a", after=local),
        PythonAdapter(foreign, "LIMIT", local),
    ):
        with pytest.raises(SpecError, match="move it to module level"):
            adapter.to_dict()
        with pytest.raises(SpecError, match="move it to module level"):
            DistributionSpec(third_party_helpers=(adapter,)).to_dict()
    with pytest.raises(SpecError, match="can't be written to JSON"):
        PythonAdapter(foreign, "LIMIT", {1, 2}).to_dict()


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_unknown_keys_and_versions(adapter: Any) -> None:
    read, good = type(adapter).from_dict, adapter.to_dict()
    for bad, text in (
        ({**good, "version": 2}, "version 2"),
        ({**good, "version": True}, "version True"),
        ({k: v for k, v in good.items() if k != "version"}, "version None"),
        ({**good, "colour": 1}, "unknown key 'colour'"),
        ({"version": 1}, "missing|required"),
    ):
        with pytest.raises(SpecError, match=text):
            read(bad)


@pytest.mark.parametrize(
    ("cls", "change", "text"),
    [
        (OpAdapter, {"op": 3}, "custom op"),
        (OpAdapter, {"arg_transforms": {"x": {"type": "gather_inputs"}}}, "positions"),
        (OpAdapter, {"arg_transforms": {"0": {"type": "scatter_outputs"}}}, "gather_inputs"),
        (OpAdapter, {"output_transforms": {"0": {"type": "all_reduce_sum", "often": 1}}}, "'often'"),
        (OpAdapter, {"output_transforms": {"0": "all_reduce_sum"}}, "expected an object"),
        (MethodAdapter, {"target": "not a name"}, "package.module:attribute"),
        (MethodAdapter, {"name": "a.b"}, "name of an attribute"),
        (MethodAdapter, {"replacement": "package.module"}, "callable"),
        (MethodAdapter, {"replacement": 3}, "callable"),
        (FunctionAdapter, {"target": "package:Class.method"}, "MethodAdapter"),
        (PythonAdapter, {"value": 3}, "'value': data"),
        (JitAdapter, {"mode": "slow"}, "marshal"),
    ],
)
def test_malformed(cls: Any, change: dict[str, Any], text: str) -> None:
    good = next(a for a in ADAPTERS if type(a) is cls).to_dict()
    with pytest.raises(SpecError, match=text):
        cls.from_dict({**good, **change})


ODD = [None, True, 0, -1, 1.0, "x", "", ["x"], [[]], {}, {"x": {}}]


def _spoiled(value: Any) -> Iterator[Any]:
    """Copies of JSON data, each with one value somewhere inside replaced by an odd one."""
    yield from ODD
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        for inner in _spoiled(value[key]):
            changed = copy.copy(value)
            changed[key] = inner
            yield changed


def test_whatever_a_file_holds_it_is_read_or_a_spec_error() -> None:
    spec = SPEC_MPNN_HALO | MLIPSpec(distribution=DistributionSpec(custom_ops=tuple(ADAPTERS)))
    read = 0
    for data in _spoiled(json.loads(json.dumps(spec.to_dict()))):
        try:
            found = MLIPSpec.from_dict(data)
        except SpecError:
            continue
        read += 1
        assert MLIPSpec.from_dict(json.loads(json.dumps(found.to_dict()))) == found, data
    assert read > 10


def test_an_install_site_is_text() -> None:
    with pytest.raises(SpecError, match=r"OpAdapter.install_site: expected a str, found \[1\]"):
        OpAdapter.from_dict({**OP.to_dict(), "install_site": [1]})
