"""The command `nvdd validate`: a model on several ranks against one process.

The command checks what needs nothing heavy; the work is in `validate_task`. Layer: cli.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

from nvdd_core.cli.config import DEVICES, DTYPES, STRATEGIES
from nvdd_core.cli.flags import require_file
from nvdd_core.cli.streams import stdout_kept
from nvdd_core.environment import found_group
from nvdd_core.errors import InputError
from nvdd_core.plugins import default_manager
from nvdd_core.plugins.composition import is_composition, read_model
from nvdd_core.plugins.options import parse_options

TASK = "nvdd_core.cli.validate_task:main"


@dataclass(frozen=True)
class ValidateJob:
    """What to validate; fields as the flags of the same names."""

    model: str
    structure: Path
    ranks: int
    strategy: str
    option: dict[str, Any]
    spec: Path | None
    save: Path | None
    fix: bool
    device: str
    dtype: str
    as_json: bool


@click.command("validate", short_help="Compare ranks with one process; say what is wrong.")
@click.argument("model")
@click.argument("structure", type=click.Path(path_type=Path))
@click.option("--ranks", type=int, default=2, show_default=True, metavar="N", help="Processes, started here.")
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="halo",
    show_default=True,
    help="How atoms are spread.",
)
@click.option(
    "--option",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the model; repeat for more. VALUE is read as TOML where it is that, else as text.",
)
@click.option(
    "--spec", type=click.Path(path_type=Path), metavar="FILE", help="Use this spec, not the model's own."
)
@click.option(
    "--save", type=click.Path(path_type=Path), metavar="FILE", help="Write the spec that works to FILE."
)
@click.option(
    "--fix/--no-fix", default=True, help="Look for a spec that works where this one fails.  [default: fix]"
)
@click.option(
    "--device", type=click.Choice(DEVICES), default="cpu", show_default=True, help="Where to compute."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True, help="Precision.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
@click.pass_context
def validate(ctx: click.Context, /, option: tuple[str, ...], **flags: Any) -> None:
    """Compare MODEL on several ranks with one process, and say what is wrong.

    MODEL is the name of an installed model, or package.module:factory or path/file.py:factory, or several of the
    first two as NAME+NAME or NAME+0.5*NAME. Of STRUCTURE, a file
    that ASE can read, the last system is taken; it should be a few cutoffs longer in one direction than there are
    ranks. Every output and its derivative are compared, and the first operation that differs is named. Exits with 0
    where the model agrees with its spec as given, else with 1, also where a spec that works was found.
    """
    job = ValidateJob(option=parse_options(option), **flags)
    _check(job)
    ctx.exit(resolve_name(TASK)(job))  # named, because its module imports torch


def _check(job: ValidateJob) -> None:
    if found_group() is not None:
        raise InputError("nvdd validate starts its own ranks; call it outside torchrun or srun")
    require_file(job.structure, "structure file")
    if job.spec is not None:
        require_file(job.spec, "spec file")
    if job.save is not None:
        _check_save(job.save)
    if job.spec is not None and is_composition(job.model):
        raise InputError(
            "--spec: a composition runs each member by the member's own spec; validate members alone"
        )
    for term in read_model(job.model):
        if ":" not in term.model:
            with stdout_kept():  # a plugin may print while it is imported
                default_manager().model(term.model)


def _check_save(path: Path) -> None:
    """Find out now, not after the whole run, whether a file can be written there."""
    folder = path.absolute().parent
    if not folder.is_dir() or (path.exists() and not path.is_file()):
        raise InputError(f"--save {path}: name a file in a folder that exists")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=path.name, suffix=".part"):
            pass  # permissions alone don't say it: /proc has them
    except OSError as exc:
        raise InputError(f"--save {path}: can't be written: {exc.strerror or exc}") from exc
