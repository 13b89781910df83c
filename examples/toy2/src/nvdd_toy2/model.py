"""TOY2: ``w = (1 - (r/rc)^2)^2``, ``h_i = sum_j w``, ``m_i = sum_j tanh(0.1 h_j) w``, ``E = 0.01 sum_i m_i^2``.

The second layer reads the first one's result on neighbours, which is what makes message passing hard to distribute.
It is written three ways, which give the same numbers on any number of ranks:

``rebind``   ordinary torch code that keeps what ``index_add`` returns
``inplace``  ordinary torch code that drops what ``index_add_`` returns
``verbs``    the exchange named by its purpose, ``refresh_neighbors``
"""

from __future__ import annotations

import torch

from nvdd_core import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec, refresh_neighbors
from nvdd_core.spec import StrategyKind
from nvdd_toy2.spec import toy2_spec

STYLES = ("rebind", "inplace", "verbs")


class Toy2:
    """The model; see the module for its formula (energies in eV, lengths in Angstrom)."""

    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    layers = 2
    neighbor_form = "full"

    def __init__(self, cutoff: float, style: str, dtype: torch.dtype, device: torch.device) -> None:
        self.cutoff, self.style, self.dtype, self.device = cutoff, style, dtype, device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Say what the ranks have to do for this way of writing it."""
        return toy2_spec(strategy, self.style)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Accept every element."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of every local row."""
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 2, 0.0)
        m = getattr(self, f"_{self.style}")(batch, *batch.edge_index, w)
        return {"node_energy": 0.01 * m**2}

    def _rebind(
        self, batch: LocalBatch, sender: torch.Tensor, receiver: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor:
        h = batch.positions.new_zeros(batch.n_local)  # a ShardTensor in a distributed run
        h = h.index_add(0, receiver, w)  # so its ghosts are refreshed here
        m = w.new_zeros(batch.n_local)  # a plain tensor: nobody reads m on ghosts
        return m.index_add(0, receiver, torch.tanh(0.1 * h[sender]) * w)

    def _inplace(
        self, batch: LocalBatch, sender: torch.Tensor, receiver: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor:
        h = batch.positions.new_zeros(batch.n_local)
        h.index_add_(0, receiver, w)
        m = w.new_zeros(batch.n_local)
        m.index_add_(0, receiver, torch.tanh(0.1 * h[sender]) * w)
        return m

    def _verbs(
        self, batch: LocalBatch, sender: torch.Tensor, receiver: torch.Tensor, w: torch.Tensor
    ) -> torch.Tensor:
        h = refresh_neighbors(w.new_zeros(batch.n_local).index_add(0, receiver, w))
        return w.new_zeros(batch.n_local).index_add(0, receiver, torch.tanh(0.1 * h[sender]) * w)


def load(*, dtype: torch.dtype, device: torch.device, cutoff: float = 2.5, style: str = "inplace") -> Toy2:
    """Make the model.

    Parameters
    ----------
    dtype, device
        As nvdd hands them to every loader.
    cutoff : float
        Angstrom.
    style : {"inplace", "rebind", "verbs"}
        How the model is written; the numbers are the same.

    Raises
    ------
    InputError
        For a cutoff or a style that makes no sense.
    """
    if not 0.0 < float(cutoff) < 1e3:
        raise InputError(f"cutoff is {cutoff}: expected a length in Angstrom above zero")
    if style not in STYLES:
        raise InputError(f"style is {style!r}: expected one of {', '.join(STYLES)}")
    return Toy2(float(cutoff), style, dtype, device)
