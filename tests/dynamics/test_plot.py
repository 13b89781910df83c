"""The picture of a run, with and without matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvdd_core.dynamics import (
    LogWriter,
    RankReport,
    build_summary,
    can_plot,
    plot_run,
    read_log,
    write_summary,
)
from nvdd_core.errors import InputError, NvddError
from tests.dynamics._support import info


def _run_folder(folder: Path, n_lines: int = 20, n_ranks: int = 3) -> tuple[Path, Path]:
    log = LogWriter(folder / "log.csv", 1)
    for step in range(n_lines):
        log.write(info(step, temperature=90.0 + step % 7))
    log.close()
    reports = [
        RankReport(k, 100, 10, 1000, 5.0, {"model": 3.0 + 0.1 * k, "exchange": 0.5, "write": 0.2})
        for k in range(n_ranks)
    ]
    write_summary(folder / "summary.json", build_summary(reports, steps=100, dt_fs=2.0))
    return folder / "log.csv", folder / "summary.json"


@pytest.mark.parametrize(("n_lines", "n_ranks"), [(20, 3), (1, 1), (2, 64)])
def test_draws(tmp_path: Path, n_lines: int, n_ranks: int) -> None:
    pytest.importorskip("matplotlib")
    png = plot_run(*_run_folder(tmp_path, n_lines, n_ranks), tmp_path / "run.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 10_000
    assert can_plot()


def test_log_is_read_back_without_a_cut_line(tmp_path: Path) -> None:
    log, _ = _run_folder(tmp_path)
    table = read_log(log)
    assert table["step"] == [float(k) for k in range(20)]
    assert table["energy"][3] == info(3).energy
    log.write_bytes(log.read_bytes() + b"20,40.0,-1")
    assert len(read_log(log)["step"]) == 20


def test_files_of_another_kind(tmp_path: Path) -> None:
    log, summary = _run_folder(tmp_path)
    with pytest.raises(InputError, match="as the log of a run"):
        plot_run(summary, summary, tmp_path / "x.png")
    with pytest.raises(InputError, match="as the summary of a run"):
        plot_run(log, log, tmp_path / "x.png")
    with pytest.raises(InputError, match="as the log of a run"):
        read_log(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match="as the log of a run"):
        read_log(tmp_path / "empty.csv")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, summary = _run_folder(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NvddError, match=r"pip install 'nvdd-core\[plot\]'"):
        plot_run(log, summary, tmp_path / "run.png")


def test_matplotlib_is_imported_on_first_use_only() -> None:
    code = "import sys, nvdd_core.dynamics; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
