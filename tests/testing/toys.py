"""A small model that does everything right, and ways to do one thing wrong; ranks import it by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import (
    SPEC_MPNN_HALO,
    ForceStrategy,
    LocalBatch,
    MLIPSpec,
    current_dd_context,
    refresh_neighbors,
)
from nvdd_core.spec import DistributionSpec, HaloStorage, OutputKind, OutputSpec, ScatterMode, StrategyKind

CUTOFF = 4.0
_LOCAL = SPEC_MPNN_HALO | MLIPSpec(
    distribution=DistributionSpec(storage=HaloStorage(scatter=ScatterMode.LOCAL))
)


class _OneWay(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class _Once(_OneWay):
    """The identity, whose derivative has none."""

    @staticmethod
    def backward(ctx, grad):
        return _OneWay.apply(grad)


class _Thrower(_OneWay):
    """The identity, whose derivative raises."""

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("a gradient of another shape")


class _Fragile(_OneWay):
    """The identity, whose second derivative raises, which is not the same as missing."""

    @staticmethod
    def backward(ctx, grad):
        return _Thrower.apply(grad)


_ODD = {"once": _Once, "fragile": _Fragile}


class Toy(torch.nn.Module):
    """Two layers of messages by plain torch; `bug` names what it does wrong."""

    cutoff = CUTOFF
    device = torch.device("cpu")
    neighbor_form = "full"
    layers = 2
    outputs = frozenset({"energy", "forces", "stress", "node_energy"})

    def __init__(self, dtype: torch.dtype, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.dtype = torch.float64 if bug == "dtype" else dtype
        self.strength = torch.nn.Parameter(torch.tensor(0.3, dtype=self.dtype))
        self.calls = 0
        self.kept: Any = None
        if bug == "shallow":
            self.layers = 1
        if bug == "lambda":
            self.hidden = lambda: None
        if bug.startswith("extra"):
            self.outputs = self.outputs | {"charge"}
        if bug == "no stress":
            self.outputs = frozenset({"energy", "forces", "node_energy"})

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        if self.bug == "wrong strategy":
            return _LOCAL
        outputs = {"charge": OutputSpec(OutputKind.PER_NODE)} if self.bug.startswith("extra") else {}
        return _LOCAL | MLIPSpec(distribution=DistributionSpec(strategy=strategy), outputs=outputs)

    def check(self, numbers: torch.Tensor, ids: torch.Tensor) -> None:
        bad = ids[(numbers != 18) & (numbers != 36)]
        if bad.numel():
            if self.bug == "mute":
                raise InputError("no")
            raise InputError(f"atom {int(bad.min())} is neither argon nor krypton")

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if self.bug == "forgetful":
            state["_parameters"] = {"strength": torch.nn.Parameter(torch.tensor(0.1, dtype=self.dtype))}
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Toy:
        twin = type(self)(self.dtype, self.bug)
        twin.calls = self.calls
        if self.bug == "shared":
            twin.strength = self.strength
        return twin

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        self.calls += 1
        energy = self._energy(batch)
        self._misbehave(batch)
        out = {"node_energy": energy[: batch.n_owned]}
        if "charge" in self.outputs:
            wrong = self.bug == "extra on two ranks" and current_dd_context().is_distributed
            out["charge"] = energy[: batch.n_owned] * (2.0 if wrong else 1.0)
        return out

    def _energy(self, batch: LocalBatch) -> torch.Tensor:
        sender, receiver = batch.edge_index
        vectors = batch.edge_vectors()
        if self.bug == "rotation":
            vectors = vectors * vectors.new_tensor([1.0, 1.1, 1.0])
        r2 = vectors.square().sum(1)
        near = torch.where(r2 < self.cutoff**2, 1.0 - r2 / self.cutoff**2, torch.zeros_like(r2)) ** 3
        if self.bug in _ODD:
            near = _ODD[self.bug].apply(near)
        crowd = near.new_zeros(batch.n_local).index_add(0, receiver, near)
        crowd = crowd * (1.0 + 0.01 * self._numbers(batch).to(crowd.dtype))
        if self.bug == "empty" and batch.n_owned == 0:
            raise ValueError("no rows here")
        if self.bug == "stale halo":
            refresh_neighbors(crowd)
        elif self.bug == "detached":
            crowd = torch.cat([crowd[: batch.n_owned], refresh_neighbors(crowd).detach()[batch.n_owned :]])
        elif self.bug != "shallow":
            crowd = refresh_neighbors(crowd)
        if self.bug == "chatty" and self.calls % 2:
            refresh_neighbors(crowd)
        pair = self.strength * near / (1.0 + crowd[sender])
        energy = pair.new_zeros(batch.n_local).index_add(0, receiver, pair)
        return self._spoilt(batch, energy)

    def _numbers(self, batch: LocalBatch) -> torch.Tensor:
        """The elements; the bug "cached" keeps those of the first call for as long as the count is the same."""
        if self.bug != "cached":
            return batch.numbers
        if self.kept is None or self.kept.shape != batch.numbers.shape:
            self.kept = batch.numbers.clone()
        return self.kept

    def _spoilt(self, batch: LocalBatch, energy: torch.Tensor) -> torch.Tensor:
        distributed = current_dd_context().is_distributed
        positions = batch.positions
        match self.bug:
            case "order":
                return energy * (1.0 + 1e-3 * torch.arange(batch.n_local, dtype=energy.dtype))
            case "absolute":
                return energy + 1e-3 * positions[:, 0] ** 2
            case "mean":
                return energy / batch.n_local
            case "random":
                return energy * (1.0 + 1e-6 * random.random())
            case "two ranks":
                return energy * (1.001 if distributed else 1.0)
            case "uneven" if distributed and batch.n_owned % 8:
                return energy * 1.001
            case "alone" if energy.numel() and not batch.edge_index.numel():
                return energy + torch.nan
        return energy

    def _misbehave(self, batch: LocalBatch) -> None:
        with torch.no_grad():
            match self.bug:
                case "mutates positions":
                    batch.positions.detach()[:1] += 1e-3
                case "mutates numbers":
                    batch.numbers[:1] = 36
                case "mutates fields":
                    batch.fields["mine"] = batch.numbers
                case "default dtype":
                    torch.set_default_dtype(torch.float64)
                case "print options":
                    np.set_printoptions(precision=3)


class Direct(Toy):
    """Computes forces and virial itself; on one rank only."""

    layers = 1

    def distribution_spec(self, strategy: StrategyKind) -> MLIPSpec:
        return super().distribution_spec(strategy) | MLIPSpec(force_strategy=ForceStrategy.DIRECT)

    def forward(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        with torch.enable_grad():
            positions = batch.positions.detach().clone().requires_grad_(True)
            strain = batch.cell.new_zeros(batch.cell.shape).requires_grad_(True)
            symmetric = 0.5 * (strain + strain.mT)
            moved = positions + (positions[:, None] @ symmetric[batch.system])[:, 0]
            inner = LocalBatch(
                **{**vars(batch), "positions": moved, "cell": batch.cell + batch.cell @ symmetric}
            )
            energy = self._energy(inner)[: batch.n_owned]
            grads = torch.autograd.grad(energy.sum(), [positions, strain], allow_unused=True)
        slope, virial = (
            torch.zeros_like(x) if g is None else g for g, x in zip(grads, [positions, strain], strict=True)
        )
        forces = slope[: batch.n_owned] * (1.0 if self.bug == "sign" else -1.0)
        if self.bug == "half stress":
            virial = 0.5 * virial
        if self.bug == "alias":
            if self.kept is None or self.kept.shape != forces.shape:
                self.kept = torch.empty_like(forces)
            forces = self.kept.copy_(forces)
        return {"node_energy": energy.detach(), "forces": forces, "virial": virial}


def load(*, dtype: torch.dtype, device: torch.device, bug: str = "") -> Toy:
    """Make the model that exchanges and is differentiated by the framework."""
    return Toy(dtype, bug)


def load_direct(*, dtype: torch.dtype, device: torch.device, bug: str = "") -> Direct:
    """Make the model that computes forces itself."""
    return Direct(dtype, bug)


def load_no_device(*, dtype: torch.dtype) -> Toy:
    """A loader that can't be called as loaders are."""
    return Toy(dtype)


def load_file(*, dtype: torch.dtype, device: torch.device, path: str = "", safe: bool = True) -> Toy:
    """Make the model with its one parameter from a file."""
    model = Toy(dtype)
    model.load_state_dict(torch.load(path, weights_only=safe))
    return model
