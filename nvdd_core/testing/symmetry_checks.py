"""Checks of a model against copies of a structure that must give the same: moved, rotated, repeated, reordered.

Each takes a model and structures, in one process. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ase
import numpy as np

from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.evaluation import Evaluated, compare_all, evaluate
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check
from nvdd_core.testing.tolerances import TIGHT, Array, Tolerance, compare


@check
def assert_row_order_is_free(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = TIGHT, where: str = "the structure"
) -> None:
    """Check that reordered atoms give the same energy and reordered forces."""
    model = ModelSource.of(model).load()
    order = np.argsort(np.sin(12.9 * np.arange(len(atoms))), kind="stable")
    expected = evaluate(model, atoms)
    moved = Evaluated(expected.totals, {name: rows[order] for name, rows in expected.rows.items()})
    compare_all(f"{where}, reordered", evaluate(model, atoms[order]), moved, tolerance)


@check
def assert_lattice_translation_of_atoms(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = TIGHT, where: str = "the structure"
) -> None:
    """Check that atoms moved by whole cells, each by another one, give the same results."""
    k = np.arange(len(atoms))
    shifts = np.stack([(7 * k % 5) - 2, (11 * k % 7) - 3, (13 * k % 3) - 1], axis=1) * atoms.pbc
    moved = atoms.copy()
    moved.positions = moved.positions + shifts @ atoms.cell.array
    model = ModelSource.of(model).load()
    compare_all(f"{where}, unfolded", evaluate(model, moved), evaluate(model, atoms), tolerance)


@check
def assert_rigid_translation(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = TIGHT, where: str = "the structure"
) -> None:
    """Check that all atoms moved alike give the same results."""
    model = ModelSource.of(model).load()
    moved = atoms.copy()
    moved.positions = moved.positions + model.cutoff * np.array([0.37, -1.21, 0.53])
    compare_all(f"{where}, translated", evaluate(model, moved), evaluate(model, atoms), tolerance)


@check
def assert_rotation(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = TIGHT, where: str = "the structure"
) -> None:
    """Check that a rotated structure has the same energy, rotated forces and a rotated stress."""
    model = ModelSource.of(model).load()
    turn = _rotation()
    turned = atoms.copy()
    turned.set_cell(atoms.cell.array @ turn.T, scale_atoms=False)
    turned.positions = atoms.positions @ turn.T
    expected, found = evaluate(model, atoms), evaluate(model, turned)
    totals = {"energy": expected.energy}
    rows = {"forces": expected.forces @ turn.T}
    if expected.stress is not None:
        totals["stress"] = turn @ expected.stress @ turn.T
    if expected.node_energy is not None:
        rows["node_energy"] = expected.node_energy
    compare_all(f"{where}, rotated", found, Evaluated(totals, rows), tolerance)


def _rotation() -> Array:
    """Return a proper rotation about no special axis."""
    q, r = np.linalg.qr(np.array([[0.3, -1.1, 0.7], [0.9, 0.4, -0.2], [-0.5, 0.8, 1.3]]))
    q = q * np.sign(np.diag(r))
    return np.asarray(q * np.linalg.det(q))


@check
def assert_replica_doubles_energy(
    model: Any, atoms: ase.Atoms, tolerance: Tolerance = TIGHT, where: str = "the structure"
) -> None:
    """Check that a 2 x 1 x 1 replica has twice the energy, the same forces on each half and the same stress."""
    model = ModelSource.of(model).load()
    alone, both = evaluate(model, atoms), evaluate(model, atoms.repeat((2, 1, 1)))
    totals = {"energy": 2.0 * alone.energy} | ({} if alone.stress is None else {"stress": alone.stress})
    twice = Evaluated(totals, {"forces": np.concatenate([alone.forces, alone.forces])})
    compare_all(f"the 2 x 1 x 1 replica of {where}", both, twice, tolerance)


@check
def assert_batch_equals_alone(
    model: Any, structures: Mapping[str, ase.Atoms], tolerance: Tolerance = TIGHT
) -> None:
    """Check that several systems evaluated together give what each gives alone."""
    if len(structures) < 2:
        raise NotApplicable("it takes two structures to make a batch")
    model = ModelSource.of(model).load()
    outputs = {"energy", "forces"}
    names = [*structures, next(iter(structures))]
    together = evaluate(model, [structures[name] for name in names], outputs)
    stops = np.cumsum([len(structures[name]) for name in names])
    parts = np.split(together.forces, stops[:-1])
    for place, (name, part) in enumerate(zip(names, parts, strict=True)):
        alone = evaluate(model, structures[name], outputs)
        found = Evaluated({"energy": together.energy[place : place + 1]}, {"forces": part})
        compare_all(f"'{name}', system {place} of a batch of {len(names)}", found, alone, tolerance)


@check
def assert_isolated_atoms(model: Any, atom: ase.Atoms, tolerance: Tolerance = TIGHT) -> None:
    """Check that one atom alone can be evaluated and feels nothing, and that two far apart add up."""
    model = ModelSource.of(model).load()
    first = atom[:1]
    first.pbc = False
    one = evaluate(model, first)
    if not np.isfinite(one.energy).all():
        raise ConformanceError(f"the energy of one atom is {one.energy[0]}")
    compare("the force on one atom alone", one.forces, np.zeros((1, 3)), tolerance)
    pair = first + first
    pair.positions[1] += [2.0 * model.layers * model.cutoff + 1.0, 0.0, 0.0]
    two = evaluate(model, pair)
    compare("the energy of two atoms far apart", two.energy, 2.0 * one.energy, tolerance)
    compare("the forces on two atoms far apart", two.forces, np.zeros((2, 3)), tolerance)
