"""The work of `nvdd evaluate`, on every rank of its group.

`main` evaluates once; rank 0 writes the report as JSON or as a table. Forces travel to rank 0 in blocks and
are written as they come, in the file's order.

Invariant: with ``--json -`` nothing else reaches standard output, and no number is written that isn't finite.
Layer: cli.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from nvdd_core.cli.config import EvaluateJob
from nvdd_core.cli.session import (
    Session,
    closeness_note,
    describe,
    group,
    members_report,
    prepare,
    read_systems,
    settings,
)
from nvdd_core.cli.streams import stdout_kept
from nvdd_core.dynamics import RowBlock, iter_row_blocks, replace_file
from nvdd_core.errors import InputError
from nvdd_core.partition import Box
from nvdd_core.runtime import Outputs, ShardedBatch

_FLAT = 1e-12  # Angstrom^3

UNITS = {
    "length": "Angstrom",
    "energy": "eV",
    "forces": "eV/Angstrom",
    "stress": "eV/Angstrom^3 (tension positive)",
}


def main(job: EvaluateJob) -> None:
    """Evaluate what `job` asks for; the report is written by rank 0 (collective)."""
    if job.json_path not in (None, "-") and _is_same_file(Path(str(job.json_path)), job.structure):
        raise InputError(f"--json {job.json_path} is the structure file itself; give another path")
    with stdout_kept(only=job.json_path == "-") as out, group(job) as mesh:
        index = job.index or (":" if job.batch else "-1")
        session = prepare(job, mesh, lambda: read_systems(job.structure, index))
        wanted = {"energy", "forces"}
        shown = _stress_shown(job, session)
        sharded = session.sharded
        if any(shown):
            wanted.add("stress")
            _give_volume(sharded)
        outputs = session.model(sharded, wanted)
        if outputs.forces is None:
            raise InputError(f"model '{job.model}' gives no forces")
        head, note = report_head(job, session, outputs, shown), closeness_note(session)
        if mesh.rank == 0:
            sys.stderr.write(note)
        fields = {"forces": outputs.forces, "system": sharded.system}
        blocks = iter_row_blocks(mesh, sharded.ids, fields, sharded.n_global)
        if mesh.rank != 0:
            for _ in blocks:  # the generator is collective
                pass
            return
        if job.json_path is None:
            out.write(table(job, session, head, _largest(blocks)))
        elif job.json_path == "-":
            out.writelines(json_chunks(head, blocks, job.batch, sharded.n_systems))
            out.flush()
        else:
            with _json_file(Path(job.json_path)) as file:
                for chunk in json_chunks(head, blocks, job.batch, sharded.n_systems):
                    file.write(chunk.encode())


def _is_same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _json_file(path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open the target of ``--json``: a file is replaced as a whole, a device or pipe is written to."""
    path = path.resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        return path.open("wb")
    return replace_file(path)


def _stress_shown(job: EvaluateJob, session: Session) -> list[bool]:
    """Return for each system whether its stress is reported."""
    sharded = session.sharded
    if job.stress is None:
        given = "stress" in session.model.model.outputs
        return [given and bool(flag) for flag in sharded.pbc.all(1).tolist()]
    if job.stress:
        volumes = torch.linalg.det(sharded.cell).abs().tolist()
        for system, volume in enumerate(volumes):
            if volume < _FLAT:
                raise InputError(f"--stress: the cell of system {system} has no volume; give it a cell")
    return [job.stress] * sharded.n_systems


def _give_volume(sharded: ShardedBatch) -> None:
    """Complete cells without a volume, so that one open system of a batch doesn't deny the others their stress.

    Only open axes change, along which nothing depends on the cell; such a system's own stress isn't shown.
    """
    flat = torch.linalg.det(sharded.cell).abs() < _FLAT
    complete = Box.from_cells(sharded.cell, sharded.pbc, "system").cell
    sharded.cell = torch.where(flat[:, None, None], complete, sharded.cell)


def report_head(job: EvaluateJob, session: Session, outputs: Outputs, shown: list[bool]) -> dict[str, Any]:
    """Return the report without its forces (collective)."""
    ranks = session.model.report()
    energies = outputs.energy.tolist()
    stresses = [None] * len(shown) if outputs.stress is None else outputs.stress.tolist()
    stresses = [stress if show else None for stress, show in zip(stresses, shown, strict=True)]
    told = settings(session)
    return {
        "energy": energies if job.batch else energies[0],
        "stress": stresses if job.batch else stresses[0],
        "n_atoms": session.sharded.n_global,
        "n_edges": sum(counts["edges"] for counts in ranks),
        "ranks": ranks,
        "model": job.model,
        "cutoff": session.model.model.cutoff,
        **members_report(session.model),
        **({"settings": told} if told else {}),
        "plugins": session.plugins,
        "units": UNITS,
    }


def json_chunks(
    head: dict[str, Any], blocks: Iterable[RowBlock], batch: bool, n_systems: int
) -> Iterator[str]:
    """Yield the report as JSON text, the forces block by block."""
    first, *rest = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in head.items()]
    yield "{" + first + ', "forces": ' + ("[" if batch else "")
    yield from _force_chunks(blocks, n_systems)
    yield ("]" if batch else "") + "".join(f", {text}" for text in rest) + "}\n"


def _force_chunks(blocks: Iterable[RowBlock], n_systems: int) -> Iterator[str]:
    current, separator = 0, ""
    yield "["
    for block in blocks:
        systems, counts = torch.unique_consecutive(block.fields["system"], return_counts=True)
        parts = block.fields["forces"].split(counts.tolist())
        for system, rows in zip(systems.tolist(), parts, strict=True):
            yield "], [" * (system - current)
            if system > current:
                current, separator = system, ""
            yield separator + json.dumps(rows.tolist(), allow_nan=False)[1:-1]
            separator = ", "
    yield "], [" * (n_systems - 1 - current) + "]"


def _largest(blocks: Iterable[RowBlock]) -> float:
    largest = 0.0
    for block in blocks:
        lengths = torch.linalg.vector_norm(block.fields["forces"], dim=1)
        largest = max(largest, float(lengths.max())) if lengths.numel() else largest
    return largest


def table(job: EvaluateJob, session: Session, head: dict[str, Any], largest_force: float) -> str:
    """Return the report as a table for people."""
    which = job.index or ("all" if job.batch else "last")
    lines = [
        f"structure  {job.structure} (system: {which})",
        f"model      {describe(job, session)}",
        *(
            f"member     {member['name']}: weight {member['weight']:g}, cutoff {member['cutoff']:.6g} A"
            for member in head.get("members", ())
        ),
        f"atoms      {head['n_atoms']}",
        f"edges      {head['n_edges']} (directed)",
        f"max |F|    {largest_force:.9g} eV/Angstrom",
    ]
    energies = head["energy"] if job.batch else [head["energy"]]
    stresses = head["stress"] if job.batch else [head["stress"]]
    for system, (energy, stress) in enumerate(zip(energies, stresses, strict=True)):
        lines += ["", f"system {system}"] if job.batch else []
        lines.append(f"energy     {energy:.12g} eV")
        if stress is not None:
            text = "".join(f"\n           {row[0]: .9e} {row[1]: .9e} {row[2]: .9e}" for row in stress)
            lines.append("stress     eV/Angstrom^3, tension positive" + text)
    lines += ["", "rank     owned     ghost      edges"]
    lines += [f"{r['rank']:4d} {r['owned']:9d} {r['ghost']:9d} {r['edges']:10d}" for r in head["ranks"]]
    return "\n".join(lines) + "\n"
