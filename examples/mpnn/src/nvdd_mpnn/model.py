"""A small message-passing potential in pure PyTorch.

Layer 1 describes an atom by radial symmetry functions (J. Behler, J. Chem. Phys. 134, 074106 (2011), eq. 5, weighted
by element as in M. Gastegger et al., J. Chem. Phys. 148, 241709 (2018)); layer 2 passes one message along every edge,
which reads the sender's features; a small network then gives each atom's energy. Weights are random, by a seed: this
is an example of structure, not a fitted potential.

Everything about ranks is in two lines, marked with (*).
"""

from __future__ import annotations

import torch
from torch import nn

from nvdd_core import InputError
from nvdd_core.runtime import LocalBatch, MLIPSpec
from nvdd_core.spec import StrategyKind
from nvdd_mpnn.spec import mpnn_spec

N_ELEMENTS = 119


class MessagePassing(nn.Module):
    """The potential; energies in eV, lengths in Angstrom.

    Parameters
    ----------
    cutoff : float
        Angstrom.
    n_radial, n_features : int
        Radial functions of the descriptor; features of an atom.
    """

    outputs = frozenset({"energy", "forces", "stress", "node_energy"})
    layers = 2
    neighbor_form = "full"
    centres: torch.Tensor

    def __init__(self, cutoff: float, n_radial: int, n_features: int) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.width = (n_radial / cutoff) ** 2
        self.register_buffer("centres", torch.linspace(0.5, cutoff, n_radial))
        self.element = nn.Parameter(0.5 + torch.rand(N_ELEMENTS, 1))
        self.embed = nn.Linear(n_radial, n_features)
        self.filter = nn.Linear(n_radial, n_features, bias=False)
        self.readout = nn.Sequential(nn.Linear(n_features, n_features), nn.Tanh(), nn.Linear(n_features, 1))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.centres.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.centres.device

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        """Say what the ranks have to do."""
        return mpnn_spec(strategy)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        """Accept every element."""

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the energy of every local row."""
        sender, receiver = batch.edge_index
        radial = self._radial(batch.edge_vectors())

        described = batch.positions.new_zeros(
            batch.n_local, radial.shape[1]
        )  # (*) a buffer of local rows ...
        described.index_add_(
            0, receiver, self.element[batch.numbers[sender]] * radial
        )  # (*) ... ghosts follow
        features = torch.tanh(self.embed(described))

        message = radial.new_zeros(batch.n_local, features.shape[1])  # plain: nobody reads it on ghosts
        message = message.index_add(0, receiver, self.filter(radial) * features[sender])
        owned = (features + message)[: batch.n_owned]
        return {"node_energy": self.readout(owned)[:, 0]}

    def _radial(self, vectors: torch.Tensor) -> torch.Tensor:
        """Radial functions (E, n_radial), going smoothly to zero at the cutoff."""
        r = vectors.square().sum(1).clamp_min(1e-12).sqrt()
        smooth = torch.where(r < self.cutoff, (1.0 - (r / self.cutoff) ** 2) ** 3, 0.0)
        return torch.exp(-self.width * (r[:, None] - self.centres) ** 2) * smooth[:, None]


def load(
    *,
    dtype: torch.dtype,
    device: torch.device,
    cutoff: float = 4.0,
    radial: int = 8,
    features: int = 16,
    seed: int = 0,
) -> MessagePassing:
    """Make the model.

    Parameters
    ----------
    dtype, device
        As nvdd hands them to every loader.
    cutoff : float
        Angstrom.
    radial, features : int
        Radial functions and features of an atom.
    seed : int
        Of the random weights.

    Raises
    ------
    InputError
        For a cutoff or a size that makes no sense.
    """
    if not 0.5 < float(cutoff) < 1e3:
        raise InputError(f"cutoff is {cutoff}: expected a length in Angstrom above 0.5")
    if radial < 1 or features < 1:
        raise InputError(f"radial is {radial} and features {features}: expected at least 1 of each")
    with torch.random.fork_rng(devices=[]):  # the user's own random numbers are not touched
        torch.manual_seed(seed)
        model = MessagePassing(float(cutoff), radial, features)
    return model.to(dtype=dtype, device=device)
