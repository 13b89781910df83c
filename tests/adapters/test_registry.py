"""Installing together: order, roll-back, sharing, conflicts, threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nvdd_core.adapters import (
    AdapterRegistry,
    FunctionAdapter,
    MethodAdapter,
    ModuleHookAdapter,
    OpAdapter,
    PythonAdapter,
)
from nvdd_core.errors import AdapterConflictError, AdapterError, SpecError
from tests.adapters import foreign, importer, replacements
from tests.adapters.foreign import Base, Block, Net
from tests.adapters.ops import edge_sum

PLUS = MethodAdapter(Block, "fixed", replacements.plus_ten)
MINUS = MethodAdapter(Block, "fixed", replacements.minus_one)
SCALE = FunctionAdapter(foreign.scale, replacements.plus_ten)
LIMIT = PythonAdapter(foreign, "LIMIT", 5)
BROKEN = PythonAdapter(foreign, "NO_SUCH", 5)


def states(registry: AdapterRegistry) -> list[str]:
    return [str(s.state) for s in registry.status()]


def test_states_and_names() -> None:
    registry = AdapterRegistry([PLUS], owner="mine")
    registry.add(LIMIT, name="mine/limit", plugin="mine")
    assert states(registry) == ["pending", "pending"]
    with registry as entered:
        assert entered is registry
        assert states(registry) == ["installed", "installed"]
    first, second = registry.status()
    assert (first.name, first.kind, first.plugin) == ("tests.adapters.foreign:Block.fixed", "method", None)
    assert second.to_dict() == {
        "name": "mine/limit",
        "kind": "python",
        "target": "tests.adapters.foreign:LIMIT",
        "install_site": "",
        "state": "restored",
        "error": None,
        "plugin": "mine",
    }
    assert first.install_site == "tests.adapters.replacements"


def test_failure_rolls_back_in_reverse() -> None:
    before = vars(Block)["fixed"], foreign.LIMIT
    registry = AdapterRegistry([PLUS, LIMIT, BROKEN, SCALE])
    for _ in range(2):
        with pytest.raises(AdapterError, match="NO_SUCH"):
            registry.install()
        assert (vars(Block)["fixed"], foreign.LIMIT) == before
        assert vars(Block)["fixed"] is before[0]
        assert states(registry) == ["restored", "restored", "failed", "pending"]
        assert "NO_SUCH" in str(registry.status()[2].error)
    registry.restore()  # nothing to do
    assert Block.fixed(1) == 3


def test_reverse_order() -> None:
    events: list[str] = []

    class Log(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            events.append(name)
            super().__setattr__(name, value)

    class Target(metaclass=Log):
        a, b = 1, 2

    with AdapterRegistry([PythonAdapter(Target, "a", 5), PythonAdapter(Target, "b", 6)]):
        pass
    assert events == ["a", "b", "b", "a"]


def test_nested_and_exceptions() -> None:
    registry = AdapterRegistry([PLUS, SCALE])

    def body() -> None:
        with registry:
            with registry:
                assert Block.fixed(1) == 13
            assert Block.fixed(1) == 13
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert Block.fixed(1) == 3
    assert importer.use(1) == 2
    assert states(registry) == ["restored", "restored"]


def test_equal_adapters_of_one_owner_are_shared() -> None:
    one = AdapterRegistry([PLUS, SCALE], owner="plugin")
    by_name = MethodAdapter(
        "tests.adapters.foreign:Block", "fixed", "tests.adapters.replacements:plus_ten", install_site="x"
    )
    two = AdapterRegistry(
        [by_name, FunctionAdapter("tests.adapters.importer:renamed", replacements.plus_ten)], owner="plugin"
    )
    raw = vars(Block)["fixed"]
    one.install()
    with pytest.raises(AdapterConflictError):  # another name of the function is another adapter
        two.install()
    assert Block.fixed(1) == 13
    three = AdapterRegistry([by_name], owner="plugin")
    three.install()
    assert Block.fixed(1) == 13  # once, not twice
    one.restore()
    assert Block.fixed(1) == 13
    three.restore()
    assert vars(Block)["fixed"] is raw


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PLUS, PLUS),
        (PLUS, MINUS),
        (SCALE, SCALE),
        (SCALE, FunctionAdapter("tests.adapters.importer:renamed", replacements.plus_ten)),
        (SCALE, PythonAdapter(foreign, "scale", 1)),
        (PythonAdapter(foreign, "scale", replacements.add_one), SCALE),
        (LIMIT, LIMIT),
        (OpAdapter(edge_sum, gather_inputs=[0]), OpAdapter(edge_sum, gather_inputs=[0])),
        (OpAdapter("toy::edge_sum"), OpAdapter("toy::edge_sum.default", gather_inputs=[0])),
        (
            ModuleHookAdapter("embed", after=replacements.add_one),
            ModuleHookAdapter(":Linear", before=replacements.double_input),
        ),
    ],
)
def test_two_owners(first: Any, second: Any) -> None:
    net = Net()
    one = AdapterRegistry([first], owner="plugin-a", root=net)
    two = AdapterRegistry([second], owner="plugin-b", root=net)
    with one:
        with pytest.raises(AdapterConflictError) as caught:
            two.install()
        message = str(caught.value)
        assert "'plugin-a'" in message
        assert "'plugin-b'" in message
        assert second.full_target in message
        assert "NVDD_PLUGINS" in message
        assert states(two) == ["failed"]
        assert states(one) == ["installed"]
    with two:  # free again
        assert states(two) == ["installed"]
        assert second != SCALE or foreign.scale(1) == 12  # what it was, not what it found the first time


class Deep(Block):
    """Inherits everything, ``inherited`` from two classes up."""


@pytest.mark.parametrize("names", [(Base, Block), (Base, Deep), (Block, Deep)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("owners", [("a", "b"), ("a", "a")])
def test_an_inherited_method_is_one_target(
    names: tuple[type, type], turned: bool, owners: tuple[str, str]
) -> None:
    first, second = reversed(names) if turned else names
    one = AdapterRegistry([MethodAdapter(first, "inherited", replacements.plus_ten)], owner=owners[0])
    two = AdapterRegistry([MethodAdapter(second, "inherited", replacements.plus_ten)], owner=owners[1])
    with one, pytest.raises(AdapterConflictError, match="inherited"):
        two.install()
    with two:
        assert second().inherited(1) == 111
    assert Deep().inherited(1) == Block().inherited(1) == Base().inherited(1) == 101


class Other(Base):
    """A sister of Block."""


def test_sisters_are_two_targets() -> None:
    one = AdapterRegistry([MethodAdapter(Block, "inherited", replacements.plus_ten)], owner="a")
    two = AdapterRegistry([MethodAdapter(Other, "inherited", replacements.minus_one)], owner="b")
    with one, two:
        assert (Block().inherited(1), Other().inherited(1), Base().inherited(1)) == (111, 100, 101)
    assert (Block().inherited(1), Other().inherited(1)) == (101, 101)


def test_one_owner_two_replacements() -> None:
    with AdapterRegistry([PLUS]), pytest.raises(AdapterConflictError):
        AdapterRegistry([MINUS]).install()
    with pytest.raises(AdapterConflictError):
        AdapterRegistry([PLUS, MINUS]).install()
    assert Block.fixed(1) == 3


def test_conflict_rolls_back() -> None:
    raw = vars(Block)["fixed"]
    with AdapterRegistry([LIMIT], owner="a"), pytest.raises(AdapterConflictError):
        AdapterRegistry([PLUS, LIMIT], owner="b").install()
    assert vars(Block)["fixed"] is raw


def test_threads() -> None:
    raw, original = vars(Block)["fixed"], foreign.scale
    shared = AdapterRegistry([PLUS, SCALE], owner="plugin")
    wrong: list[Any] = []

    def work(own: bool) -> None:
        registry = AdapterRegistry([PLUS, SCALE], owner="plugin") if own else shared
        for _ in range(200):
            with registry:
                found = Block.fixed(1), importer.use(1)
                if found != (13, 12):
                    wrong.append(found)

    threads = [threading.Thread(target=work, args=(k % 2 == 0,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not wrong
    assert vars(Block)["fixed"] is raw
    assert foreign.scale is importer.scale is original


def test_add() -> None:
    registry = AdapterRegistry()
    with pytest.raises(SpecError, match="expected an adapter"):
        registry.add("x")  # type: ignore[arg-type]
    registry.add(PLUS)
    with registry, pytest.raises(AdapterError, match="restore first"):
        registry.add(LIMIT)
    assert len(registry) == 1
