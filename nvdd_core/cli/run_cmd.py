"""The command `nvdd run`: molecular dynamics of a structure file.

The command merges a run file with flags, checks the result and hands a `RunJob` to the launcher; the work
itself is in `run_task`. Layer: cli.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from nvdd_core.cli.config import CAPTURES, ENSEMBLES, RunJob, build, read_run_file
from nvdd_core.cli.flags import check_inputs, collect, debug_flag, group_flags, model_flags
from nvdd_core.cli.launch import execute
from nvdd_core.cli.output import check_output
from nvdd_core.cli.streams import stdout_kept
from nvdd_core.environment import found_group
from nvdd_core.errors import InputError
from nvdd_core.plugins import default_manager
from nvdd_core.plugins.options import placed_options

TASK = "nvdd_core.cli.run_task:main"


@click.command("run", short_help="Molecular dynamics of a structure file.")
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option("--structure", type=click.Path(path_type=Path), help="Structure file that ASE can read.")
@model_flags
@click.option("--ensemble", type=click.Choice(ENSEMBLES), help="[default: nve]")
@click.option("--dt", type=float, metavar="FS", help="Time step, fs.  [default: 1.0]")
@click.option("--steps", type=int, metavar="N", help="Number of steps.  [default: 1000]")
@click.option(
    "--temperature",
    type=float,
    metavar="K",
    help="Of the thermostat, and of initial velocities where the structure file has none.",
)
@click.option("--friction", type=float, metavar="1/FS", help="Of the Langevin thermostat.  [default: 0.01]")
@click.option("--seed", type=int, metavar="N", help="Of all random numbers.  [default: 0]")
@group_flags
@click.option("--skin", type=float, metavar="A", help="Extra reach of the neighbour lists.  [default: 1.0]")
@click.option(
    "--capture",
    type=click.Choice(CAPTURES),
    help="Capture evaluations in CUDA graphs; auto: where launches take the time.  [default: auto]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder for everything that is written.  [default: runs/ and the structure file's name]",
)
@click.option("--log-every", type=int, metavar="N", help="Steps between lines of log.csv.  [default: 10]")
@click.option(
    "--trajectory-every", type=int, metavar="N", help="Steps between frames, 0 for none.  [default: 100]"
)
@click.option(
    "--checkpoint-every", type=int, metavar="N", help="Steps between checkpoints, 0 for none.  [default: 0]"
)
@click.option(
    "--restart",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="Go on from a checkpoint, up to step --steps; give the run file and flags of the run that wrote it.",
)
@click.option("--overwrite", is_flag=True, help="Replace the files of an earlier run in the output folder.")
@debug_flag
def run(file: Path | None, overwrite: bool, debug: bool, **flags: Any) -> None:
    """Run molecular dynamics as FILE and the flags say; flags win.

    A FILE whose name ends in .toml is a run file: the same keys as the flags (with _ for -), the options of the
    model in a table [option]; relative paths in it are taken from its own folder. Any other FILE is the
    structure, as with --structure. The output folder gets log.csv, trajectory.xyz, final.xyz, summary.json,
    run.png, checkpoint.safetensors (with --checkpoint-every) and run.toml, the configuration that was used.
    """
    in_file: dict[str, Any] = {}
    if file is not None and file.suffix.lower() == ".toml":
        in_file = read_run_file(file)
    elif file is not None:
        if flags["structure"] is not None:
            raise InputError(
                f"two structures: {file} and --structure {flags['structure']}; give one (a run file ends in .toml)"
            )
        flags["structure"] = file
    values, where = collect(flags)
    sources = {key: f"{file}: {key}" for key in in_file} | where
    merged = merge(in_file, values, Path() if file is None else file.parent)
    job = build(RunJob, {**merged, "overwrite": overwrite}, sources)
    check_inputs(job)
    if found_group() is None:
        check_output(job)
    execute(TASK, job, debug=debug)


def merge(in_file: Mapping[str, Any], flags: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values of a run file in `folder` and of flags, which win.

    Options that are paths become absolute, a file's from its own folder and a flag's from the current one, so that the
    resolved run file and a restart find them from anywhere.
    """
    merged = {**in_file, **flags}
    model, in_table = merged.get("model"), in_file.get("option", {})
    if not isinstance(model, str) or not isinstance(in_table, dict):
        return merged  # the check of the job names the mistake
    with stdout_kept():  # a plugin may print while it is imported
        manager = default_manager()
        options = placed_options(manager, model, in_table, folder)
        options |= placed_options(manager, model, flags.get("option", {}))
    return {**merged, "option": options}
