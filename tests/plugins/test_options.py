"""Options of loaders as flags give them."""

from __future__ import annotations

import pytest

from nvdd_core.errors import InputError
from nvdd_core.plugins.options import parse_options


def test_options_are_toml_values_or_text() -> None:
    pairs = [
        "cutoff=8.5", "n=3", "flag=true", "shift=force", "path=/a/b=c.pt", "list=[1, 2]",
        "table={Ar=3.4}", "date=2024-01-01", "empty=", 'quoted="8.5"', "two=1\nx=2",
    ]  # fmt: skip
    assert parse_options(pairs) == {
        "cutoff": 8.5, "n": 3, "flag": True, "shift": "force", "path": "/a/b=c.pt", "list": [1, 2],
        "table": {"Ar": 3.4}, "date": "2024-01-01", "empty": "", "quoted": "8.5", "two": "1\nx=2",
    }  # fmt: skip


@pytest.mark.parametrize("pair", ["cutoff", "=8.5", " =1"])
def test_option_without_key_or_value(pair: str) -> None:
    with pytest.raises(InputError, match="KEY=VALUE"):
        parse_options([pair])


def test_option_twice() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_options(["a=1", "a=2"])
