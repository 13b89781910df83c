"""The output folder of a run: its files' names, and the rule that nothing is overwritten unasked.

Layer: cli.
"""

from __future__ import annotations

from pathlib import Path

from nvdd_core.cli.config import RunJob, run_toml
from nvdd_core.errors import InputError

LOG = "log.csv"
TRAJECTORY = "trajectory.xyz"
SUMMARY = "summary.json"
PLOT = "run.png"
RESOLVED = "run.toml"
FINAL = "final.xyz"
CHECKPOINT = "checkpoint.safetensors"
OURS = (LOG, TRAJECTORY, SUMMARY, PLOT, RESOLVED, FINAL, CHECKPOINT)


def check_output(job: RunJob) -> None:
    """Refuse an output folder that can't be used; changes nothing.

    Raises
    ------
    InputError
        When the folder is not empty and `overwrite` was not asked for, or is not a folder.
    """
    folder = job.output_folder()
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"output {folder}: is not a folder; choose another --output")
    if job.structure.resolve() in {(folder / name).resolve() for name in OURS}:
        raise InputError(
            f"output folder {folder} holds the structure file of this run; choose another --output"
        )
    if any(folder.iterdir()) and not (job.overwrite or job.continues()):
        raise InputError(
            f"output folder {folder} is not empty; pass --overwrite to replace the files of an earlier run "
            "in it, or choose another --output"
        )


def prepare_output(job: RunJob) -> Path:
    """Create the output folder, remove an earlier run's files and write the resolved configuration.

    A restart in the folder of its own run keeps log, trajectory and checkpoint.

    Raises
    ------
    InputError
        As `check_output`, or when the folder can't be written to.
    """
    check_output(job)
    folder = job.output_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY, PLOT, FINAL) if job.continues() else OURS:
            (folder / name).unlink(missing_ok=True)
        (folder / RESOLVED).write_text(run_toml(job), encoding="utf-8")
    except OSError as exc:
        raise InputError(f"output folder {folder}: cannot be written to: {exc.strerror}") from exc
    return folder
