"""One evaluation as the checks see it: structures in, plain arrays in the order of the atoms out.

Key objects: `Evaluated`, `evaluate`, `Watched`. Invariant: an evaluation copies what it is
given and returns arrays of its own. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ase
import numpy as np
import torch

from nvdd_core.comm import Mesh
from nvdd_core.runtime import (
    Batch,
    DistributedModel,
    DomainConfig,
    LocalBatch,
    MLIPSpec,
    Model,
    Outputs,
    ShardedBatch,
)
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.failures import ConformanceError
from nvdd_core.testing.tolerances import Array, Tolerance, compare
from nvdd_core.validate.observe import wanted_outputs

Atoms: TypeAlias = "ase.Atoms | Sequence[ase.Atoms]"


@dataclass(frozen=True)
class Evaluated:
    """Results in the order of the atoms given.

    Attributes
    ----------
    totals : mapping of str to array
        What there is once or once a system: ``energy`` (S,), ``stress`` (S, 3, 3), ...
    rows : mapping of str to array
        What there is for each atom: ``forces`` (N, 3), ``node_energy`` (N,), ...
    """

    totals: Mapping[str, Array]
    rows: Mapping[str, Array]

    @property
    def energy(self) -> Array:
        """Energies of the systems, (S,), eV."""
        return self.totals["energy"]

    @property
    def forces(self) -> Array:
        """Forces, (N, 3), eV/Angstrom."""
        return self.rows["forces"]

    @property
    def stress(self) -> Array | None:
        """Stress (S, 3, 3), eV/Angstrom^3, where it was asked for."""
        return self.totals.get("stress")

    @property
    def node_energy(self) -> Array | None:
        """Energies of the atoms, (N,), eV, where they were asked for."""
        return self.rows.get("node_energy")


def outputs_for(model: Model, atoms: Atoms) -> frozenset[str]:
    """Return everything that a model can give for these structures, forces among them."""
    if "forces" not in model.outputs:
        raise ConformanceError(f"the model's `outputs` have no forces: {', '.join(sorted(model.outputs))}")
    return wanted_outputs(model, Batch.from_ase(atoms))


def evaluate(
    model: Any, atoms: Atoms, outputs: Iterable[str] | None = None, config: DomainConfig | None = None
) -> Evaluated:
    """Evaluate in this process.

    Parameters
    ----------
    model : Model, or anything that `ModelSource` takes
    atoms : Atoms or sequence of Atoms
    outputs : iterable of str, optional
        Default: see `outputs_for`.
    config : DomainConfig, optional
    """
    model = ModelSource.of(model).load()
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), Mesh.single(model.device))
    wanted = outputs_for(model, atoms) if outputs is None else frozenset(outputs)
    distributed = DistributedModel(model, config)
    found = as_arrays(distributed(sharded, wanted), distributed.spec, wanted)
    order = torch.argsort(sharded.ids).numpy()
    return Evaluated(found.totals, {name: rows[order] for name, rows in found.rows.items()})


def as_arrays(outputs: Outputs, spec: MLIPSpec, wanted: frozenset[str]) -> Evaluated:
    """Copy the `wanted` outputs of a call into arrays of their own, in the order of its rows."""
    totals: dict[str, Array] = {}
    rows: dict[str, Array] = {}
    for name, value in outputs.named().items():
        if name in wanted | {"energy"}:
            (rows if spec.per_row(name) else totals)[name] = value.detach().double().numpy().copy()
    return Evaluated(totals, rows)


def compare_all(where: str, found: Evaluated, expected: Evaluated, tolerance: Tolerance) -> None:
    """Compare everything that is expected; raises ConformanceError naming output and place."""
    for left, right in ((found.totals, expected.totals), (found.rows, expected.rows)):
        for name, value in right.items():
            if name not in left:
                raise ConformanceError(f"{name} of {where} is missing")
            compare(f"{name} of {where}", left[name], value, tolerance)


class Watched:
    """A model that passes everything on and remembers what its forward did to the batch it got."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.changed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run the model's own forward and compare every tensor of the batch with a copy made before."""
        tensors = dict(_tensors(batch))
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        fields = dict(batch.fields)
        out = self._model.forward(batch)
        self.changed += [n for n, t in tensors.items() if not _same(t.detach(), before[n])]
        if batch.fields.keys() != fields.keys() or any(batch.fields[n] is not t for n, t in fields.items()):
            self.changed.append("fields")
        return out


def _tensors(batch: LocalBatch) -> list[tuple[str, torch.Tensor]]:
    neighbors = batch.neighbors
    named = {name: getattr(batch, name) for name in ("positions", "cell", "pbc", "numbers", "system", "ids")}
    named |= {f"neighbors.{n}": getattr(neighbors, n) for n in ("receivers", "senders", "row_splits")}
    named |= {"neighbors.image_rows": neighbors.image_rows, "neighbors.image_shifts": neighbors.image_shifts}
    named |= {f"fields[{name!r}]": tensor for name, tensor in batch.fields.items()}
    return list(named.items())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True))


def need_forces(where: str, found: Evaluated) -> float:
    """Return the largest force component; refuse a structure on which a check would say nothing."""
    largest = float(np.abs(found.forces).max(initial=0.0))
    if largest == 0.0:
        raise ConformanceError(
            f"all forces on {where} are zero, so the check would say nothing; give `spacing` or `structures` in "
            "which atoms feel one another"
        )
    return largest
