"""TOY2 with its second layer in a Warp kernel: the model knows nothing of ranks, the adapter in ``spec`` does.

``w = (1 - (r/rc)^2)^2``, ``h_i = sum_j w``, ``m_i = sum_j tanh(0.1 h_j) w``, ``E = 0.01 sum_i m_i^2``.
"""

from __future__ import annotations

import torch

from nvdd_core import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec, to_local
from nvdd_core.spec import StrategyKind
from nvdd_warp_kernel.ops import messages
from nvdd_warp_kernel.spec import kernel_spec


class WarpKernel:
    """The model; energies in eV, lengths in Angstrom."""

    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    layers = 2
    neighbor_form = "full"

    def __init__(self, cutoff: float, dtype: torch.dtype, device: torch.device) -> None:
        self.cutoff, self.dtype, self.device = cutoff, dtype, device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Say what the ranks have to do."""
        return kernel_spec(strategy)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Accept every element."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of every local row."""
        sender, receiver = batch.edge_index
        r2 = batch.edge_vectors().square().sum(1)
        w = torch.where(r2 < self.cutoff**2, (1.0 - r2 / self.cutoff**2) ** 2, 0.0)
        h = w.new_zeros(batch.n_local).index_add(0, receiver, w)
        return {"node_energy": 0.01 * to_local(messages(h, w, sender, receiver)) ** 2}


def load(*, dtype: torch.dtype, device: torch.device, cutoff: float = 2.5) -> WarpKernel:
    """Make the model; `cutoff` in Angstrom.

    Raises
    ------
    InputError
        For a cutoff that makes no sense.
    """
    if not 0.0 < float(cutoff) < 1e3:
        raise InputError(f"cutoff is {cutoff}: expected a length in Angstrom above zero")
    return WarpKernel(float(cutoff), dtype, device)
