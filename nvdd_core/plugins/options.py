"""Options of a model's loader, as they are written on a command line.

Key object: `parse_options`, for every command that takes ``--option``. Layer: plugins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from nvdd_core.errors import InputError


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``k=v`` flags; a value is a TOML value where it is one, and text otherwise.

    Raises
    ------
    InputError
        When a flag has no ``=`` or a key comes twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--option {pair!r}: expected KEY=VALUE, as in --option cutoff=8.5")
        if key in options:
            raise InputError(f"--option {key!r} is given twice")
        options[key] = _option_value(text)
    return options


def _option_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # More than one key means that the text held a line break; a date has no JSON form. Both are plain text.
    if len(value) == 1 and isinstance(value["value"], (bool, int, float, str, list, dict)):
        return value["value"]
    return text
