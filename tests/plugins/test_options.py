"""Options of loaders as flags give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvdd_core.errors import InputError
from nvdd_core.plugins import ModelDecl, PluginInfo, PluginManager, Ref, hookimpl
from nvdd_core.plugins.options import parse_options, placed_options


def test_options_are_toml_values_or_text() -> None:
    pairs = [
        "cutoff=8.5", "n=3", "flag=true", "shift=force", "path=/a/b=c.pt", "list=[1, 2]",
        "half=.5", "five=-5.e1", "ip=1.2.3",
        "table={Ar=3.4}", "date=2024-01-01", "empty=", 'quoted="8.5"', "two=1\nx=2",
    ]  # fmt: skip
    assert parse_options(pairs) == {
        "cutoff": 8.5, "n": 3, "flag": True, "shift": "force", "path": "/a/b=c.pt", "list": [1, 2],
        "half": 0.5, "five": -50.0, "ip": "1.2.3",
        "table": {"Ar": 3.4}, "date": "2024-01-01", "empty": "", "quoted": "8.5", "two": "1\nx=2",
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["cutoff", "=8.5", " =1"])
def test_option_without_key_or_value(pair: str) -> None:
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_options([pair])


def test_option_twice() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_options(["a=1", "a=2"])


class _Plugin:
    """A model with two options that are paths."""

    @hookimpl
    def nvdd_plugin_info(self) -> PluginInfo:
        return PluginInfo(api=1)

    @hookimpl
    def nvdd_declare_models(self) -> list[ModelDecl]:
        return [ModelDecl("m", Ref("a:b"), paths=("file", "other"))]


def test_paths_count_from_where_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager([])
    manager.register(_Plugin(), name="m")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")
    given = {"file": "a.model", "other": "~/b", "text": "a.model", "n": 3}
    assert placed_options(manager, "m", given) == {
        "file": f"{tmp_path}/here/a.model", "other": "/home/me/b", "text": "a.model", "n": 3,
    }  # fmt: skip
    placed = placed_options(manager, "m", {"file": Path("../x/a"), "other": 7}, tmp_path / "job")
    assert placed == {"file": f"{tmp_path}/x/a", "other": 7}
    assert placed_options(manager, "m", {"file": "/a"}, tmp_path) == {"file": "/a"}
    assert placed_options(manager, "absent", given) == given
