"""Replacements that have a name."""

from __future__ import annotations

from typing import Any


def plus_ten(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) + 10


def minus_one(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) - 1


def as_list(original: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return [original(*args, **kwargs)]


def double_input(module: Any, args: Any, kwargs: Any) -> Any:
    return (2 * args[0], *args[1:]), kwargs


def add_one(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    return output + 1
