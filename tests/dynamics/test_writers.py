"""What the writers leave on disk, also after a kill, a full disk and a restart, and on several ranks."""

from __future__ import annotations

import csv
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ase
import ase.io
import numpy as np
import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import HookContext, LogWriter, TrajectoryWriter, trim_log, trim_partial_frame
from nvdd_core.dynamics.units import ASE_TIME_PER_FS
from nvdd_core.errors import InputError, NvddError
from tests.dynamics._support import context, info


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    """Let writes beyond `n_bytes` fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _write(path: Path, *contexts: HookContext, **options: object) -> None:
    writer = TrajectoryWriter(path, 10, **options)  # type: ignore[arg-type]
    for ctx in contexts:
        writer(ctx)
    writer.close()


def _check_frame(atoms: ase.Atoms, ctx: HookContext) -> None:
    order = torch.argsort(ctx.state.ids)
    state = ctx.state
    assert atoms.numbers.tolist() == ctx.sharded.numbers[order].tolist()
    np.testing.assert_allclose(atoms.positions, state.positions[order], rtol=0, atol=1e-10)
    np.testing.assert_allclose(atoms.get_forces(), state.forces[order], rtol=1e-11)
    np.testing.assert_allclose(atoms.get_masses(), state.masses[order], rtol=1e-11)
    velocities = atoms.get_velocities() * ASE_TIME_PER_FS
    np.testing.assert_allclose(velocities, state.velocities[order], rtol=1e-11)
    np.testing.assert_array_equal(atoms.cell, ctx.sharded.cell[0])
    np.testing.assert_array_equal(atoms.pbc, ctx.sharded.pbc[0])
    assert atoms.get_potential_energy() == ctx.info.energy
    assert atoms.info["step"] == ctx.step
    assert atoms.info["time_fs"] == ctx.info.time_fs


@pytest.mark.parametrize("isotopes", [False, True])
@pytest.mark.parametrize("block_rows", [4, 1000])
def test_ase_reads_all_of_it(tmp_path: Path, isotopes: bool, block_rows: int) -> None:
    path = tmp_path / "new" / "traj.extxyz"
    contexts = [context(step=step, isotopes=isotopes) for step in (0, 10, 20)]
    _write(path, *contexts, block_rows=block_rows)
    frames = ase.io.read(path, index=":")
    assert len(frames) == 3
    for atoms, ctx in zip(frames, contexts, strict=True):
        _check_frame(atoms, ctx)
        assert ("masses" in atoms.arrays) == isotopes


def test_open_system_without_cell(tmp_path: Path) -> None:
    ctx = context()
    ctx.sharded.cell.zero_()
    ctx.sharded.pbc.zero_()
    _write(tmp_path / "t.xyz", ctx)
    atoms = ase.io.read(tmp_path / "t.xyz", format="extxyz")
    assert not atoms.pbc.any()
    assert atoms.cell.rank == 0


def test_single_row(tmp_path: Path) -> None:
    _write(tmp_path / "t.extxyz", context(1))
    _check_frame(ase.io.read(tmp_path / "t.extxyz"), context(1))


def test_several_systems_are_refused(tmp_path: Path) -> None:
    ctx = context()
    ctx.sharded.cell = ctx.sharded.cell.repeat(2, 1, 1)
    with pytest.raises(InputError, match="holds one system, this batch has 2"):
        _write(tmp_path / "t.extxyz", ctx)


def _on_rank(path: Path, block_rows: int) -> bool:
    mesh = Mesh.from_process_group()
    for isotopes in (False, True):
        _write(path, context(23, mesh, isotopes=isotopes), append=True, block_rows=block_rows)
    return path.exists()


@pytest.mark.parametrize(("size", "block_rows"), [(2, 7), (3, 1000)])
def test_same_file_from_any_number_of_ranks(rank_pool, tmp_path: Path, size: int, block_rows: int) -> None:
    alone, together = tmp_path / "1.extxyz", tmp_path / "n.extxyz"
    for isotopes in (False, True):
        _write(alone, context(23, isotopes=isotopes), append=True)
    rank_pool(size).run(_on_rank, together, block_rows)
    assert alone.read_bytes() == together.read_bytes()


def test_replaces_or_continues(tmp_path: Path) -> None:
    path = tmp_path / "t.extxyz"
    _write(path, context(step=0), context(step=10))
    _write(path, context(step=20))
    assert [a.info["step"] for a in ase.io.read(path, ":")] == [20]
    _write(path, context(step=30), append=True)
    assert [a.info["step"] for a in ase.io.read(path, ":")] == [20, 30]


@pytest.mark.parametrize("cut", [1, 30, 300])
def test_continues_after_the_last_whole_frame(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.extxyz"
    _write(path, context(step=0), context(step=10))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    _write(path, context(step=10), append=True)
    assert path.read_bytes() == whole


def test_trim_counts_frames_and_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "t.extxyz"
    _write(path, context(step=0), context(step=10))
    assert trim_partial_frame(path) == 2
    with path.open("ab") as file:
        file.write(b"11")
    assert trim_partial_frame(path) == 2
    path.write_bytes(b"")
    assert trim_partial_frame(path) == 0
    path.write_text("step,energy\n1,2\n")
    with pytest.raises(InputError, match="is not an XYZ trajectory"):
        trim_partial_frame(path)
    assert path.read_text() == "step,energy\n1,2\n"


def test_trim_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "t.extxyz"
    _write(path, *(context(step=step) for step in (0, 10, 20, 30)))
    assert trim_partial_frame(path, 35) == 4
    assert trim_partial_frame(path, 20) == 3
    assert [a.info["step"] for a in ase.io.read(path, ":")] == [0, 10, 20]


@pytest.mark.parametrize(("last", "lines"), [(0, 2), (15, 3), (20, 4), (99, 5)])
def test_trim_a_log(tmp_path: Path, last: int, lines: int) -> None:
    path = tmp_path / "log.csv"
    text = "step,energy\n0,1.0\n10,2.0\n20,3.0\n30,4.0\n"
    path.write_text(text + "40,5")  # cut short by a kill
    trim_log(path, last)
    assert path.read_text() == "".join(text.splitlines(keepends=True)[:lines])


def test_trim_refuses_what_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("a,b\nx,1\n")
    with pytest.raises(InputError, match="line 2 begins with no step"):
        trim_log(path, 10)
    assert path.read_text() == "a,b\nx,1\n"


def test_full_disk_leaves_whole_frames(tmp_path: Path) -> None:
    path = tmp_path / "t.extxyz"
    writer = TrajectoryWriter(path, 10)
    writer(context(step=0))
    size = path.stat().st_size
    with (
        file_size_limit(size + size // 2),
        pytest.raises(NvddError, match=r"can't write .*t\.extxyz.*are kept"),
    ):
        writer(context(step=10))
    assert path.stat().st_size == size
    writer(context(step=20))
    writer.close()
    assert [a.info["step"] for a in ase.io.read(path, ":")] == [0, 20]


def test_a_failure_among_the_blocks_leaves_whole_frames(tmp_path: Path) -> None:
    """Another rank's death shows in a collective while a frame is being put together."""
    path = tmp_path / "t.extxyz"
    writer = TrajectoryWriter(path, 10, block_rows=4)
    writer(context(step=0))
    before = path.read_bytes()
    broken = context(step=10)
    broken.state.ids[3] = 0
    with pytest.raises(NvddError):
        writer(broken)
    writer.close()
    assert path.read_bytes() == before


_KILLED = """
import os, signal, sys
from pathlib import Path
from nvdd_core.dynamics import LogWriter, TrajectoryWriter
from tests.dynamics._support import context, info
folder = Path(sys.argv[1])
log, trajectory = LogWriter(folder / "log.csv", 1), TrajectoryWriter(folder / "t.extxyz", 1)
for step in range(5):
    log.write(info(step))
    trajectory(context(step=step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_loses_nothing_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [a.info["step"] for a in ase.io.read(tmp_path / "t.extxyz", ":")] == [0, 1, 2, 3, 4]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 6


def test_log_reads_back_exactly(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log.csv", 5)
    infos = [info(step, pressure_gpa=0.1 * step, extra={"drift": 1e-17 * step}) for step in (0, 5, 10)]
    for one in infos:
        writer(replace(context(), info=one))
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("step", "time_fs", "energy", "kinetic", "total", "temperature"),
        *("pressure_gpa", "drift"),
    ]
    for row, one in zip(rows, infos, strict=True):
        assert int(row["step"]) == one.step
        for name in ("time_fs", "energy", "kinetic", "total", "temperature", "pressure_gpa"):
            assert float(row[name]) == getattr(one, name)
        assert float(row["drift"]) == one.extra["drift"]
    writer.close()
    writer.close()


def test_log_continues(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    writer = LogWriter(path, 1)
    for step in range(3):
        writer.write(info(step))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    again = LogWriter(path, 1, append=True)
    again.write(info(2))
    again.close()
    assert path.read_bytes() == whole
    other = LogWriter(path, 1, append=True)
    with pytest.raises(InputError, match="has the columns"):
        other.write(info(3, pressure_gpa=1.0))
    replaced = LogWriter(path, 1)
    replaced.write(info(9))
    replaced.close()
    assert len(path.read_text().splitlines()) == 2


def test_log_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    writer = LogWriter(path, 1)
    writer.write(info(0))
    size = path.stat().st_size
    with file_size_limit(size + 10), pytest.raises(NvddError, match="Lines written before are kept"):
        writer.write(info(1))
    writer.write(info(2))
    writer.close()
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", "0", "2"]


def test_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(NvddError, match="can't write"):
        LogWriter(tmp_path / "out" / "log.csv", 1).write(info(0))
    with pytest.raises(NvddError, match="can't write"):
        _write(tmp_path / "out" / "t.extxyz", context())
