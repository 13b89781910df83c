"""Flags that `nvdd evaluate` and `nvdd run` share, and the checks that need nothing heavy in memory.

`model_flags` and `group_flags` decorate a command; `collect` turns what click parsed into plain values for
`config.build`; `check_inputs` looks at files and plugins before any process is started.

Invariant: nothing here imports torch, numpy or ase. Layer: cli.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from nvdd_core.cli.config import DEVICES, DTYPES, STRATEGIES, JobConfig
from nvdd_core.cli.streams import stdout_kept
from nvdd_core.environment import found_group
from nvdd_core.errors import InputError
from nvdd_core.plugins import default_manager
from nvdd_core.plugins.composition import read_model
from nvdd_core.plugins.options import parse_options

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_FLAGS = (
    click.option(
        "--model",
        metavar="NAME",
        help="Model that an installed plugin declares (see `nvdd models`), or several: NAME+NAME, NAME+0.5*NAME.",
    ),
    click.option(
        "--option",
        multiple=True,
        metavar="KEY=VALUE",
        help="Option of the model; repeat for more. VALUE is read as TOML where it is that, else as text. "
        "NAME.KEY=VALUE is for one of several models.",
    ),
    click.option("--dtype", type=click.Choice(DTYPES), help="Precision of the model.  [default: float64]"),
    click.option(
        "--device", type=click.Choice(DEVICES), help="Where to compute.  [default: cuda where there is a GPU]"
    ),
)

_GROUP_FLAGS = (
    click.option(
        "--ranks", type=int, metavar="N", help="Processes, started here.  [default: 1, or the grid's]"
    ),
    click.option(
        "--grid", metavar="A,B,C", help="Ranks along each cell vector.  [default: recursive bisection]"
    ),
    click.option(
        "--strategy", type=click.Choice(STRATEGIES), help="How the system is spread.  [default: halo]"
    ),
)

debug_flag = click.option("--debug", is_flag=True, help="Show tracebacks, of all ranks.")


def model_flags(command: F) -> F:
    """Add the flags that choose a model."""
    return _decorated(command, _MODEL_FLAGS)


def group_flags(command: F) -> F:
    """Add the flags that choose how the work is spread."""
    return _decorated(command, _GROUP_FLAGS)


def _decorated(command: F, flags: tuple[Callable[[F], F], ...]) -> F:
    return reduce(lambda inner, flag: flag(inner), reversed(flags), command)


def collect(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the given flags as plain values, and the words that name each one's source.

    Raises
    ------
    InputError
        When ``--option`` can't be read.
    """
    values = {key: value for key, value in flags.items() if value is not None and value != ()}
    if "option" in values:
        values["option"] = parse_options(values["option"])
    return values, {key: "--" + key.replace("_", "-") for key in values}


def check_inputs(job: JobConfig) -> None:
    """Check that the file to begin with and the model's plugin are there, before processes are started.

    Within a group this is left to the task, where only rank 0 needs the file and all ranks agree on errors.

    Raises
    ------
    InputError
        Names the file, or the model with near names and what is installed.
    """
    if found_group() is not None:
        return
    require_file(*job.inputs())
    with stdout_kept():  # a plugin may print while it is imported
        for term in read_model(job.model):
            default_manager().model(term.model)


def require_file(path: Path, what: str) -> None:
    """Raise `InputError` unless `path` is a file that can be read."""
    if not path.exists():
        raise InputError(f"{what} {path}: no such file")
    if not path.is_file():
        raise InputError(f"{what} {path}: is not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{what} {path}: permission denied")
