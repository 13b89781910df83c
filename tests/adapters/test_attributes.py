"""Methods, functions and attributes: the effect, and the very same objects afterwards."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from nvdd_core.adapters import AdapterRegistry, FunctionAdapter, MethodAdapter, PythonAdapter, base, places
from nvdd_core.errors import AdapterError
from nvdd_core.plugins.rows import Ref
from tests.adapters import foreign, importer, replacements
from tests.adapters.foreign import Base, Block

MINE: Any = sys.modules[__name__]
MISSING: Any = object()


def entries() -> dict[str, Any]:
    """The raw entries of everything that these tests change."""
    found = {f"{owner.__name__}.{k}": v for owner in (Base, Block) for k, v in vars(owner).items()}
    for module in (foreign, importer, replacements):
        found |= {f"{module.__name__}.{k}": v for k, v in vars(module).items()}
    return found


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Whatever a test does, each entry is the very object that it was."""
    before = entries()
    yield
    after = entries()
    assert after.keys() == before.keys()
    changed = [name for name in before if after[name] is not before[name]]
    assert not changed


def plus_ten(*args: Any, **kwargs: Any) -> Any:
    return replacements.plus_ten(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "call", "before", "after"),
    [
        ("forward", lambda: Block().forward(1, extra=1), 5, 15),
        ("inherited", lambda: Block().inherited(1), 101, 111),
        ("fixed", lambda: Block.fixed(2) + Block().fixed(2), 12, 32),
        ("size", lambda: Block().size, 7, 17),
    ],
)
def test_method(name: str, call: Any, before: Any, after: Any) -> None:
    adapter = MethodAdapter(Block, name, replacements.plus_ten)
    for _ in range(2):
        assert call() == before
        memento = adapter.install()
        assert call() == after
        adapter.restore(memento)
    assert call() == before
    assert ("inherited" in vars(Block)) is False


def test_class_method() -> None:
    with AdapterRegistry([MethodAdapter(Block, "named", replacements.as_list)]):
        assert Block.named(1) == [("Block", 1)]
        assert Block().named(1) == [("Block", 1)]
    assert Block.named(1) == ("Block", 1)


def test_base_and_subclass_are_two_places() -> None:
    with AdapterRegistry(
        [MethodAdapter(Base, "forward", plus_ten), MethodAdapter(Block, "forward", replacements.minus_one)]
    ):
        assert Block().forward(0) == (1 + 10) * 2 - 1
    assert Block().forward(0) == 2


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        (MethodAdapter(Block, "forwards", plus_ten), "no such attribute"),
        (MethodAdapter(Block, "once", plus_ten), "PythonAdapter"),
        (MethodAdapter("tests.adapters.foreign:Blok", "forward", plus_ten), "Blok"),
        (MethodAdapter("tests.adapters.forein:Block", "forward", plus_ten), "can't be found"),
        (MethodAdapter(Block, "forward", "tests.adapters.replacements:none"), "can't be found"),
        (MethodAdapter(dict, "get", plus_ten), "can't be set"),
        (FunctionAdapter("tests.adapters.foreign:scal", plus_ten), "can't be found"),
        (PythonAdapter(foreign, "LIMITS", 1), "no such attribute"),
        (FunctionAdapter("tests.adapters.foreign:LIMIT", plus_ten), "PythonAdapter"),
        (FunctionAdapter("tests.adapters.foreign:Block", plus_ten), "MethodAdapter"),
        (FunctionAdapter(Block, plus_ten), "MethodAdapter"),
    ],
)
def test_errors_name_target_and_way_out(adapter: Any, text: str) -> None:
    with pytest.raises(AdapterError, match=text) as caught:
        adapter.install()
    assert adapter.full_target.rpartition(":")[2][:4] in str(caught.value)


def test_function_everywhere() -> None:
    adapter = FunctionAdapter(foreign.scale, plus_ten)
    original = foreign.scale
    for _ in range(2):
        memento = adapter.install()
        assert importer.use(1) == 12
        assert importer.renamed(1, by=3) == 13
        assert foreign.scale is importer.scale is importer.renamed
        adapter.restore(memento)
        assert importer.use(1) == 2
        assert foreign.scale is importer.scale is importer.renamed is original


@pytest.fixture
def no_late_module() -> Iterator[None]:
    sys.modules.pop("tests.adapters.late", None)
    yield
    sys.modules.pop("tests.adapters.late", None)
    vars(sys.modules["tests.adapters"]).pop("late", None)


@pytest.mark.usefixtures("no_late_module")
def test_module_that_is_loaded_meanwhile() -> None:
    registry = AdapterRegistry([FunctionAdapter(foreign.scale, plus_ten)])
    with registry:
        pass
    with registry:
        late = importlib.import_module("tests.adapters.late")
        assert late.scale(1) == 12
    assert late.scale is foreign.scale
    with registry:  # known from now on
        assert late.scale(1) == 12
    assert late.scale is foreign.scale


@pytest.mark.usefixtures("no_late_module")
def test_module_that_is_loaded_between() -> None:
    registry = AdapterRegistry([FunctionAdapter(foreign.scale, plus_ten)])
    with registry:
        pass
    late = importlib.import_module("tests.adapters.late")
    with registry:
        assert late.scale(1) == 12
    assert late.scale is foreign.scale


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was searched for in all modules."""
    found: list[Any] = []
    search = places._holders
    monkeypatch.setattr(places, "_holders", lambda value: found.append(value) or search(value))
    return found


def test_function_that_is_taken_lazily(searches: list[Any]) -> None:
    registry = AdapterRegistry([FunctionAdapter(foreign.scale, plus_ten)])
    try:
        with registry:
            exec("from tests.adapters.foreign import scale as lazy", vars(importer))
            boxed = [importer.lazy]
            assert boxed[0](1) == 12
        assert importer.lazy is foreign.scale
        assert boxed[0](1) == 2  # where no search looks, the wrapper does nothing any more
        with registry:  # known from now on
            assert importer.lazy(1) == boxed[0](1) == 12
        exec("from tests.adapters.foreign import scale as between", vars(importer))
        with registry:
            assert importer.between(1) == 12
        assert importer.between is foreign.scale
        searches.clear()
        for _ in range(3):
            with registry:
                assert importer.use(1) == 12
        assert searches == []
    finally:
        vars(importer).pop("lazy", None)
        vars(importer).pop("between", None)


def test_method_that_is_kept() -> None:
    names = ("forward", "fixed", "named")
    replacement = {"forward": plus_ten, "fixed": plus_ten, "named": replacements.as_list}
    with AdapterRegistry([MethodAdapter(Block, name, replacement[name]) for name in names]):
        kept = [getattr(Block(), name) for name in names]
        assert [f(1) for f in kept] == [14, 13, [("Block", 1)]]
    assert [f(1) for f in kept] == [4, 3, ("Block", 1)]


@pytest.mark.parametrize(
    ("target", "name", "value", "read"),
    [
        (foreign, "LIMIT", 5, lambda: foreign.LIMIT),
        (Block, "rate", 5, lambda: Block().rate),
        ("tests.adapters.foreign", "LIMIT", 5, lambda: foreign.LIMIT),
        ("tests.adapters.foreign:Block", "rate", [5], lambda: Block.rate),
        (foreign, "scale", replacements.add_one, lambda: foreign.scale),
        (foreign, "scale", Ref("tests.adapters.replacements:add_one"), lambda: foreign.scale),
    ],
)
def test_python_attribute(target: Any, name: str, value: Any, read: Any) -> None:
    expected = replacements.add_one if isinstance(value, Ref) else value
    with AdapterRegistry([PythonAdapter(target, name, value)]):
        assert read() == expected
    assert read() != expected


def test_stranger_is_left_alone_and_named() -> None:
    registry = AdapterRegistry(
        [
            MethodAdapter(Block, "fixed", plus_ten),
            MethodAdapter(Block, "forward", plus_ten),
            FunctionAdapter(foreign.scale, plus_ten),
        ]
    )
    raw, original = vars(Block)["forward"], importer.renamed

    def his(self: Any, x: Any) -> Any:
        return "his"

    registry.install()
    Block.forward = his  # type: ignore[method-assign,assignment]
    importer.renamed = his
    with pytest.raises(AdapterError, match="somebody else changed it") as caught:
        registry.restore()
    try:
        assert "Block.forward" in str(caught.value)
        assert "importer.renamed" in str(caught.value)
        assert Block().forward(1) == "his"
        assert importer.renamed is his
        assert [s.state for s in registry.status()] == ["restored", "failed", "failed"]
        assert "somebody else" in str(registry.status()[1].error)
        assert foreign.scale is importer.scale is original
    finally:
        Block.forward = raw  # type: ignore[method-assign]
        importer.renamed = original
    with registry:  # the target is free again
        assert Block().forward(1) == 14


def test_error_of_the_body_goes_first() -> None:
    registry = AdapterRegistry([PythonAdapter(foreign, "LIMIT", 5)])
    before = foreign.LIMIT

    def body() -> None:
        with registry:
            foreign.LIMIT = 9
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    foreign.LIMIT = before
    assert "somebody else" in caught.value.__notes__[0]


def test_our_own_modules_keep_what_they_use() -> None:
    original = dataclasses.dataclass
    with AdapterRegistry([FunctionAdapter("dataclasses:dataclass", replacements.as_list)]):
        assert dataclasses.dataclass is not original
        assert vars(base)["dataclass"] is original
