"""Integrators as steps of a state: `first_half`, new forces, `second_half`.

`VelocityVerlet` keeps the energy, `Langevin` keeps the temperature (BAOAB splitting; Leimkuhler, Matthews
2013). They work in place on the owned rows, never communicate and never synchronise a GPU: everything that
ranks must agree on happens in the runner between the halves.

Invariant: a row's new values depend on that row only (and on its global id), so any distribution of rows
gives the same bits.
Layer: dynamics.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from nvdd_core.dynamics.noise import STREAM_THERMOSTAT, NoiseBuffers, normal
from nvdd_core.dynamics.state import MDState
from nvdd_core.dynamics.units import ACCELERATION, K_B
from nvdd_core.errors import InputError
from nvdd_core.tensor import version_of


class Integrator(Protocol):
    """What the runner asks of an integrator.

    Attributes
    ----------
    name : str
        Short name, as in a run file.
    dt : float
        Time step in fs.
    conserves_momentum : bool
        Whether the total momentum stays what it was; decides the degrees of freedom.
    """

    @property
    def name(self) -> str:
        """Short name, as in a run file."""

    @property
    def dt(self) -> float:
        """Time step in fs."""

    @property
    def conserves_momentum(self) -> bool:
        """Whether the total momentum stays what it was."""

    def init(self, state: MDState) -> None:
        """Prepare for `state`; its forces are those at its positions."""

    def first_half(self, state: MDState) -> None:
        """Do everything that comes before the new forces, in place."""

    def second_half(self, state: MDState) -> None:
        """Do everything that comes after the new forces, in place, and count the step."""

    def parameters(self) -> dict[str, float | int | str]:
        """Return what a log or a checkpoint should say about this integrator."""


class _PerMass:
    """Rows of ``scale / mass`` or its root, one column per axis, remade only when the masses change.

    Full (n, 3) rows: a factor that broadcasts along the last axis would keep the in-place updates from
    running as one flat, vectorised loop, at several times their cost.
    """

    def __init__(self, scale: float, *, root: bool = False) -> None:
        self._scale, self._root = scale, root
        self._masses: torch.Tensor | None = None
        self._version = -1
        self._rows = torch.empty(0)

    def __call__(self, masses: torch.Tensor) -> torch.Tensor:
        version = version_of(masses)
        if masses is not self._masses or version != self._version:
            factor = self._scale / masses
            factor = factor.sqrt() if self._root else factor
            self._rows = factor[:, None].expand(-1, 3).contiguous()
            self._masses, self._version = masses, version
        return self._rows


class VelocityVerlet:
    """Constant-energy dynamics by the velocity Verlet scheme.

    Parameters
    ----------
    dt : float
        Time step in fs.

    Raises
    ------
    InputError
        If `dt` isn't finite and positive.
    """

    name = "nve"
    conserves_momentum = True

    def __init__(self, dt: float) -> None:
        self.dt = _checked("dt", dt, "fs", positive=True)
        self._kick = _PerMass(0.5 * dt * ACCELERATION)

    def init(self, state: MDState) -> None:
        """Check the state and derive what depends on its masses."""
        state.validate()
        self._kick(state.masses)

    def first_half(self, state: MDState) -> None:
        """Half kick, drift."""
        state.velocities.addcmul_(state.forces, self._kick(state.masses))
        state.positions.add_(state.velocities, alpha=self.dt)

    def second_half(self, state: MDState) -> None:
        """Half kick."""
        state.velocities.addcmul_(state.forces, self._kick(state.masses))
        state.step += 1

    def parameters(self) -> dict[str, float | int | str]:
        """Return name and time step."""
        return {"name": self.name, "dt": self.dt}


class Langevin:
    """Constant-temperature dynamics by the Langevin equation, split as BAOAB.

    Positions sample the canonical distribution with an error of order dt^2 that vanishes for harmonic wells.

    Parameters
    ----------
    dt : float
        Time step in fs.
    temperature : float
        K, zero or more.
    friction : float
        1/fs, zero or more; zero is constant-energy dynamics.
    seed : int
        Keys the noise together with the step and the global row id.

    Raises
    ------
    InputError
        If a parameter is out of range.
    """

    name = "nvt-langevin"

    def __init__(self, dt: float, temperature: float, friction: float, seed: int) -> None:
        self.dt = _checked("dt", dt, "fs", positive=True)
        self.temperature = _checked("temperature", temperature, "K")
        self.friction = _checked("friction", friction, "1/fs")
        self.seed = seed
        self._buffers = NoiseBuffers()
        self._decay = math.exp(-friction * dt)
        # expm1 keeps the variance exact where friction * dt is tiny
        variance = -math.expm1(-2.0 * friction * dt) * K_B * temperature * ACCELERATION
        self._is_noisy = variance > 0.0
        self._kick = _PerMass(0.5 * dt * ACCELERATION)
        self._spread = _PerMass(variance, root=True)

    @property
    def conserves_momentum(self) -> bool:
        """Only without friction: drag and noise act on every row by itself."""
        return self.friction == 0.0

    def init(self, state: MDState) -> None:
        """Check the state and derive what depends on its masses."""
        state.validate()
        self._kick(state.masses)
        self._spread(state.masses)

    def first_half(self, state: MDState) -> None:
        """B (half kick), A (half drift), O (drag and noise), A (half drift)."""
        velocities = state.velocities.addcmul_(state.forces, self._kick(state.masses))
        state.positions.add_(velocities, alpha=0.5 * self.dt)
        if self._decay != 1.0:
            velocities.mul_(self._decay)
        if self._is_noisy:
            noise = normal(self.seed, state.step, state.ids, 3, STREAM_THERMOSTAT, buffers=self._buffers)
            velocities.addcmul_(noise, self._spread(state.masses))
        state.positions.add_(velocities, alpha=0.5 * self.dt)

    def second_half(self, state: MDState) -> None:
        """B (half kick)."""
        state.velocities.addcmul_(state.forces, self._kick(state.masses))
        state.step += 1

    def parameters(self) -> dict[str, float | int | str]:
        """Return name, time step, temperature, friction and seed."""
        return {
            "name": self.name,
            "dt": self.dt,
            "temperature": self.temperature,
            "friction": self.friction,
            "seed": self.seed,
        }


def _checked(name: str, value: float, unit: str, *, positive: bool = False) -> float:
    if math.isfinite(value) and (value > 0.0 or (value == 0.0 and not positive)):
        return float(value)
    wanted = "finite and positive" if positive else "finite and not negative"
    raise InputError(f"{name} is {value} {unit}; it must be {wanted}")
