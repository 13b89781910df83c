"""Checkpoints: exact, whole, the same from any number of ranks, and never code."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nvdd_core.comm import Mesh
from nvdd_core.dynamics import (
    Checkpoint,
    CheckpointWriter,
    Langevin,
    MDState,
    VelocityVerlet,
    write_checkpoint,
)
from nvdd_core.errors import InputError, NvddError
from tests.dynamics._support import context
from tests.dynamics.test_writers import file_size_limit


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def _write(path: Path, mesh: Mesh | None = None, block_rows: int = 5, step: int = 40) -> None:
    integrator = Langevin(2.0, 95.0, 0.01, seed=3)
    CheckpointWriter(path, 10, integrator, info={"model": "lj"}, block_rows=block_rows)(
        context(23, mesh, step)
    )


def test_bit_identical_state(tmp_path: Path) -> None:
    path = tmp_path / "out" / "last.ckpt"
    _write(path)
    ctx = context(23)
    ctx_order = torch.argsort(ctx.state.ids)
    checkpoint = Checkpoint(path)
    assert checkpoint.step == 40
    assert checkpoint.n_rows == 23
    assert checkpoint.info["model"] == "lj"
    assert checkpoint.info["integrator"] == Langevin(2.0, 95.0, 0.01, seed=3).parameters()
    rows = checkpoint.rows()
    for name in ("positions", "velocities", "forces", "masses"):
        assert _same_bits(rows[name], getattr(ctx.state, name)[ctx_order])
    assert _same_bits(rows["numbers"], ctx.sharded.numbers[ctx_order])
    assert _same_bits(rows["system"], ctx.sharded.system[ctx_order])
    assert _same_bits(rows["fields.charge"], ctx.sharded.fields["charge"][ctx_order])
    assert _same_bits(rows["fields.tag"], ctx.sharded.fields["tag"][ctx_order])
    assert set(rows) == set(checkpoint.row_names)
    assert _same_bits(checkpoint.globals()["cell"], ctx.sharded.cell)
    assert _same_bits(checkpoint.globals()["pbc"], ctx.sharded.pbc)


def test_finish_writes_what_is_not_yet_written(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "c", 10, VelocityVerlet(1.0))
    writer(context(step=40))
    place = (tmp_path / "c").stat().st_ino
    writer.finish(context(step=40))
    assert (tmp_path / "c").stat().st_ino == place
    writer.finish(context(step=43))
    assert Checkpoint(tmp_path / "c").step == 43


def test_odd_values_keep_their_bits(tmp_path: Path) -> None:
    values = torch.tensor([0.1, -0.0, 5e-324, 1.7976931348623157e308, torch.inf, -torch.inf, torch.nan]).to(
        torch.float64
    )
    bits = torch.tensor([0x7FF8_0000_0000_1234, 1], dtype=torch.int64).view(torch.float64)
    x = torch.cat([values, bits])
    write_checkpoint(tmp_path / "c", Mesh.single(), torch.arange(9), {"x": x}, 9, step=1)
    assert _same_bits(Checkpoint(tmp_path / "c").rows()["x"], x)


def test_any_range_of_rows_as_tensors_of_their_own(tmp_path: Path) -> None:
    _write(tmp_path / "c")
    checkpoint = Checkpoint(tmp_path / "c")
    everything = checkpoint.rows()
    part = checkpoint.rows(7, 12)
    assert all(_same_bits(part[name], everything[name][7:12]) for name in everything)
    part["positions"].zero_()
    assert _same_bits(checkpoint.rows()["positions"], everything["positions"])
    assert checkpoint.rows(5, 5)["positions"].shape == (0, 3)
    for start, stop in ((-1, 3), (4, 3), (0, 24)):
        with pytest.raises(InputError, match="it has rows 0 to 23"):
            checkpoint.rows(start, stop)


def _on_rank(path: Path) -> None:
    _write(path, Mesh.from_process_group(), block_rows=4)


@pytest.mark.parametrize("size", [2, 3])
def test_same_file_from_any_number_of_ranks(rank_pool, tmp_path: Path, size: int) -> None:
    _write(tmp_path / "1")
    rank_pool(size).run(_on_rank, tmp_path / "n")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "n").read_bytes()


@pytest.mark.parametrize("kind", ["nve", "langevin"])
def test_a_restart_continues_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """20 steps in one go, and 10 + file + 10: nothing else than the file is needed."""

    def run(state: MDState, steps: int) -> None:
        integrator = VelocityVerlet(2.0) if kind == "nve" else Langevin(2.0, 95.0, 0.01, seed=3)
        integrator.init(state)
        for _ in range(steps):
            integrator.first_half(state)
            torch.mul(state.positions, -0.7, out=state.forces)
            integrator.second_half(state)

    once, first = context(23).state, context(23).state
    run(once, 20)
    run(first, 10)
    names = ("positions", "velocities", "forces", "masses", "ids")
    rows = {name: getattr(first, name) for name in names}
    write_checkpoint(tmp_path / "c", Mesh.single(), first.ids, rows, 23, step=first.step)
    for _ in range(2):
        checkpoint = Checkpoint(tmp_path / "c")
        second = MDState(**checkpoint.rows(), step=checkpoint.step)
        run(second, 10)
        order = torch.argsort(once.ids)
        assert torch.equal(second.positions, once.positions[order])
        assert torch.equal(second.velocities, once.velocities[order])
        assert second.step == once.step == 60


def test_a_batch_of_it(tmp_path: Path) -> None:
    ctx = context(23)
    CheckpointWriter(tmp_path / "c", 1, VelocityVerlet(1.0))(ctx)
    batch = Checkpoint(tmp_path / "c").batch()
    order = torch.argsort(ctx.state.ids)
    assert torch.equal(batch.positions, ctx.state.positions[order])
    assert torch.equal(batch.velocities, ctx.state.velocities[order])
    assert torch.equal(batch.fields["charge"], ctx.sharded.fields["charge"][order])
    assert torch.equal(batch.cell, ctx.sharded.cell)
    assert torch.equal(batch.ids, torch.arange(23))
    write_checkpoint(tmp_path / "d", Mesh.single(), torch.arange(3), {"x": torch.zeros(3)}, 3, step=0)
    with pytest.raises(InputError, match="has no positions, velocities, masses, numbers, system, cell, pbc"):
        Checkpoint(tmp_path / "d").batch()


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "c"
    _write(path, step=40)
    before = path.read_bytes()
    with file_size_limit(len(before) // 2), pytest.raises(NvddError, match=r"can't write .*unchanged"):
        _write(path, step=50)
    assert path.read_bytes() == before
    broken = context(23)
    broken.state.ids[0] = broken.state.ids[1]
    with pytest.raises(NvddError, match="occurs twice"):
        CheckpointWriter(path, 1, VelocityVerlet(1.0))(broken)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    _write(path, step=60)
    assert Checkpoint(path).step == 60


@dataclass
class _Planted:
    marker: Path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_reading_runs_no_code(tmp_path: Path) -> None:
    path, marker = tmp_path / "c", tmp_path / "marker"
    for data in (pickle.dumps(_Planted(marker)), b"\x80\x04" * 5000):
        path.write_bytes(data)
        with pytest.raises(InputError, match="is not a checkpoint"):
            Checkpoint(path)
    torch.save({"x": 1}, path)
    with pytest.raises(InputError, match="is not a checkpoint"):
        Checkpoint(path)
    assert not marker.exists()


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    _write(tmp_path / "c")
    data = (tmp_path / "c").read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:length])
        with pytest.raises(InputError, match=r"cut is not a checkpoint"):
            Checkpoint(tmp_path / "cut")
    (tmp_path / "long").write_bytes(data + b"x")
    with pytest.raises(InputError, match="bytes long, expected"):
        Checkpoint(tmp_path / "long")


def _with_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "another kind"),
        ([], "is not a checkpoint"),
        ({"__metadata__": {"format": "pt"}}, "another kind"),
        ({"__metadata__": {"format": "nvdd-checkpoint", "version": "2"}}, "version 2 of the format"),
        ({"__metadata__": {"format": "nvdd-checkpoint", "version": "1"}}, "is not a checkpoint"),
    ],
)
def test_other_headers(tmp_path: Path, header: object, message: str) -> None:
    (tmp_path / "c").write_bytes(_with_header(header))
    with pytest.raises(InputError, match=message):
        Checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [-1], "data_offsets": [8, 0]},
        {"dtype": "F64", "shape": [1], "data_offsets": [-8, 0]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": 1, "data_offsets": [0, 8]},
        {"dtype": "F64"},
        3,
    ],
)
def test_malformed_entries(tmp_path: Path, entry: object) -> None:
    metadata = {"format": "nvdd-checkpoint", "version": "1", "step": "0", "n_rows": "1", "info": "{}"}
    (tmp_path / "c").write_bytes(_with_header({"__metadata__": metadata, "rows.x": entry}) + bytes(8))
    with pytest.raises(InputError, match="is not a checkpoint"):
        Checkpoint(tmp_path / "c")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't read the checkpoint .*No such file"):
        Checkpoint(tmp_path / "none")


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    rows = {"x": torch.zeros(3, dtype=torch.complex64)}
    with pytest.raises(InputError, match=r"'x' has torch\.complex64"):
        write_checkpoint(tmp_path / "c", Mesh.single(), torch.arange(3), rows, 3, step=0)
    assert list(tmp_path.iterdir()) == []
