"""Options of a model's loader, as they are written on a command line or in a run file.

Key objects: `parse_options`, for every command that takes ``--option``; `placed_options`, for what outlives the
folder that it was written in. Layer: plugins.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvdd_core.errors import InputError, PluginNotFoundError, PluginUnusableError
from nvdd_core.plugins.composition import Term, flattened, read_model

if TYPE_CHECKING:
    from nvdd_core.plugins.manager import PluginManager

_BARE_FLOAT = re.compile(r"\s*[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?\s*")  # which TOML leaves out


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``k=v`` flags; a value is a TOML value or a number like ``.5`` where it is one, and text otherwise.

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


def placed_options(
    manager: PluginManager, model: str, options: Mapping[str, Any], folder: Path | None = None
) -> dict[str, Any]:
    """Return a model's options with those that its plugin declares as paths made absolute.

    Of a model that can't be found or used, options are returned as they are: whoever needs the model says so. Those
    of a composition come out as ``member.option`` where that is how they were given.

    Parameters
    ----------
    manager : PluginManager
        Where the plugins are.
    model : str
        The model's name.
    options : mapping
        As the user wrote them.
    folder : Path, optional
        What relative paths count from; default the current folder.
    """
    terms = read_model(model)
    if len(terms) > 1:
        options = flattened(terms, options)
    paths = [path for term in terms for path in _paths(manager, term, alone=len(terms) == 1)]
    base = Path() if folder is None else folder
    return {
        name: os.path.abspath(base / os.path.expanduser(value))
        if name in paths and isinstance(value, str | os.PathLike)
        else value
        for name, value in options.items()
    }


def _paths(manager: PluginManager, term: Term, *, alone: bool) -> list[str]:
    """Return the keys under which a path can be given for one model, or one member."""
    try:
        paths = manager.model(term.model).paths
    except (PluginNotFoundError, PluginUnusableError):
        return []
    return list(paths) if alone else [key for path in paths for key in (path, f"{term.name}.{path}")]


def _option_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return float(text) if _BARE_FLOAT.fullmatch(text) else text
    # More than one key means that the text held a line break; a date has no JSON form. Both are plain text.
    if len(value) == 1 and isinstance(value["value"], (bool, int, float, str, list, dict)):
        return value["value"]
    return text
