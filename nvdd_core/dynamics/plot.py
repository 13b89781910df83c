"""A picture of a run: energy, temperature, and where each rank spent its time.

Reads what the run wrote (log table, summary), so it can be drawn at any time and without the run.
Matplotlib is an extra and is imported on first use; drawing needs no display.

Invariant: no global state of matplotlib is touched: figures are made without pyplot.
Layer: dynamics.
"""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from nvdd_core.dynamics.files import replace_file
from nvdd_core.errors import InputError, NvddError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MISSING = (
    "the picture of a run needs matplotlib, which is not installed; install it with "
    "pip install 'nvdd-core[plot]', or run without the picture"
)


def can_plot() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_run(log: Path | str, summary: Path | str, png: Path | str) -> Path:
    """Draw a run's log and summary into a PNG file.

    Parameters
    ----------
    log : Path
        Table that `LogWriter` wrote.
    summary : Path
        File that `write_summary` wrote.
    png : Path
        File to write; replaced when the picture is complete.

    Returns
    -------
    Path
        `png`.

    Raises
    ------
    NvddError
        If matplotlib isn't installed, or the picture can't be written.
    InputError
        If one of the two files can't be read.
    """
    try:
        from matplotlib.figure import Figure  # an extra, and slow to import
    except ImportError as exc:
        raise NvddError(_MISSING) from exc
    table = read_log(log)
    phases = _phases_of_ranks(Path(summary))
    figure = Figure(figsize=(8.0, 9.0), layout="constrained")
    energy, temperature, timing = figure.subplots(3, 1)
    _draw_energy(energy, table)
    _draw_temperature(temperature, table)
    _draw_timing(timing, phases)
    png = Path(png)
    with replace_file(png) as file:
        figure.savefig(file, format="png", dpi=120)
    return png


def read_log(path: Path | str) -> dict[str, list[float]]:
    """Return the columns of a log table; a last line cut short by a killed run is left out.

    Raises
    ------
    InputError
        If the file can't be read or isn't such a table.
    """
    try:
        with Path(path).open(newline="", encoding="ascii") as file:
            header, *lines = list(csv.reader(file)) or [[]]
            if not {"time_fs", "energy", "total", "temperature"} <= set(header):
                raise ValueError(f"its first line is {header}")
            rows = [[float(value) for value in line] for line in lines if len(line) == len(header)]
    except (OSError, ValueError) as exc:
        raise InputError(f"can't read {path} as the log of a run: {exc}") from exc
    return {name: [row[k] for row in rows] for k, name in enumerate(header)}


def _phases_of_ranks(path: Path) -> list[dict[str, float]]:
    """Return each rank's seconds by phase."""
    try:
        return [dict(entry["phases_s"]) for entry in json.loads(path.read_text())["ranks"]]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise InputError(f"can't read {path} as the summary of a run: {exc}") from exc


def _picoseconds(table: dict[str, list[float]]) -> list[float]:
    return [time * 1e-3 for time in table["time_fs"]]


def _draw_energy(axes: Axes, table: dict[str, list[float]]) -> None:
    """Potential and total energy, each from its first value, so that a drift isn't lost beside the sum."""
    for name, label in (("energy", "potential"), ("total", "total")):
        values = table[name]
        if values:
            start = values[0]
            shown = f"{label}, from {start:.6g} eV"
            axes.plot(_picoseconds(table), [value - start for value in values], label=shown)
    axes.set(xlabel="time / ps", ylabel="energy change / eV")
    if table["energy"]:
        axes.legend()


def _draw_temperature(axes: Axes, table: dict[str, list[float]]) -> None:
    axes.plot(_picoseconds(table), table["temperature"], color="tab:red")
    axes.set(xlabel="time / ps", ylabel="temperature / K")


def _draw_timing(axes: Axes, phases: list[dict[str, float]]) -> None:
    """One bar per rank, its phases one after another."""
    ranks = list(range(len(phases)))
    left = [0.0] * len(phases)
    for name in dict.fromkeys(name for entry in phases for name in entry):
        width = [entry.get(name, 0.0) for entry in phases]
        axes.barh(ranks, width, left=left, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(xlabel="wall time / s", ylabel="rank", yticks=ranks if len(ranks) <= 16 else [0, ranks[-1]])
    axes.invert_yaxis()
    if phases:
        axes.legend(ncols=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
