"""The command `nvdd evaluate`: one energy, forces and stress.

The command checks its input and hands an `EvaluateJob` to the launcher; the work itself is in
`evaluate_task`. Layer: cli.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from nvdd_core.cli.config import EvaluateJob, build
from nvdd_core.cli.flags import check_inputs, collect, debug_flag, group_flags, model_flags
from nvdd_core.cli.launch import execute
from nvdd_core.errors import InputError

TASK = "nvdd_core.cli.evaluate_task:main"


@click.command("evaluate", short_help="Energy, forces and stress of a structure file.")
@click.argument("file", type=click.Path(path_type=Path))
@model_flags
@group_flags
@click.option("--index", metavar="INDEX", help="Which systems of FILE: 3, -1, :, 0:10:2.  [default: last]")
@click.option("--batch", is_flag=True, help="Evaluate all chosen systems together.  [--index default: all]")
@click.option(
    "--stress/--no-stress",
    default=None,
    help="Ask for the stress, or not.  [default: where a system is periodic in all three directions]",
)
@click.option("--json", "json_path", metavar="PATH", help="Write JSON to PATH; - is standard output.")
@debug_flag
def evaluate(file: Path, batch: bool, debug: bool, **flags: Any) -> None:
    """Compute energy, forces and stress of FILE, any structure file that ASE can read.

    Of a file with several systems the last one is taken, as ASE does, unless --index or --batch says
    otherwise. Energies are in eV, forces in eV/Angstrom and in the file's order, the stress in
    eV/Angstrom^3 with tension positive.
    """
    values, where = collect(flags)
    job = build(EvaluateJob, {"structure": file, "batch": batch, **values}, {**where, "json_path": "--json"})
    check_inputs(job)
    if job.index is not None and ":" in job.index and not job.batch:
        raise InputError(
            f"--index {job.index} may choose several systems; add --batch to evaluate them together"
        )
    if job.json_path not in {None, "-"}:
        _check_writable(Path(str(job.json_path)))
    execute(TASK, job, debug=debug)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"--json {path}: is a folder; name a file, or - for standard output")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--json {path}: there is no folder {path.absolute().parent}; create it first")
