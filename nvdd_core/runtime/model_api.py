"""What a plugin's loader returns: the model contract.

Layer: runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from nvdd_core.runtime.batch import LocalBatch
from nvdd_core.runtime.mlip_spec import MLIPSpec
from nvdd_core.spec import StrategyKind


class Model(Protocol):
    """An interatomic potential.

    Attributes
    ----------
    cutoff : float
        Angstrom; edges are as long as this at most.
    dtype : torch.dtype
        float32 or float64.
    device : torch.device
    outputs : frozenset of str
        What it can give: energy (which every model has to), forces, stress, node_energy, node_virial, and any other
        that its spec declares in ``outputs``.
    layers : int
        Message-passing layers; 1 for a pair potential.
    neighbor_form : str
        ``half`` or ``full``, see `nvdd_core.graph.NeighborList`.

    A model that chooses parameters by the system may have a method ``describe()``, whose text commands print after an
    evaluation. One whose options give what is else a field of the batch may have an attribute ``given_fields``, the
    names of such fields, which a composition then refuses to feed.
    """

    @property
    def cutoff(self) -> float:
        """See the class."""

    @property
    def dtype(self) -> torch.dtype:
        """See the class."""

    @property
    def device(self) -> torch.device:
        """See the class."""

    @property
    def outputs(self) -> frozenset[str]:
        """See the class."""

    @property
    def layers(self) -> int:
        """See the class."""

    @property
    def neighbor_form(self) -> str:
        """See the class."""

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Return what the model needs under `strategy`; raises SpecError where it can't run so."""

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Raise InputError naming the first atom (of `ids`) whose element the model lacks."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Evaluate this rank's share.

        Returns
        -------
        dict of str to Tensor
            ``node_energy`` (n_owned,) or (n_local,), eV, or ``energy`` (S,), eV: by its `OutputSpec` this rank's
            share, or (``Reduce.OWNED_ONLY``) complete on every rank. Differentiable; or, with ForceStrategy.DIRECT,
            what ``batch.requested`` asks of them (for energy, too), of ``forces`` (n_owned, 3) and, for stress, of
            ``virial`` (S, 3, 3), the derivative of this rank's partial energy with respect to a strain. Per-row
            results that are shares on local rows, ghosts' included, have n_local rows and are declared
            ``Reduce.ALL_REDUCE``. Either way ``node_virial`` (n_owned, 3, 3) and outputs of the model's own where
            they are asked for.
        """


@dataclass(frozen=True)
class Member:
    """One model of a composition: what it is called there, and the factor of its energy."""

    name: str
    model: Model
    weight: float = 1.0


def members_of(model: object) -> tuple[Member, ...]:
    """Return the members of a composition, and of any other model none."""
    found = getattr(model, "members", ())
    if not isinstance(found, tuple) or not all(isinstance(member, Member) for member in found):
        return ()
    return found
