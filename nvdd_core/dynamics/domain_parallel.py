"""Runs dynamics over all ranks: integrator, force evaluations, rebuilds, hooks.

A step without a due hook has one exchange of positions and one small all-reduce, which carries "a row moved too
far" and "a force is not finite" and runs while the forces are computed. Forces that turn out to rest on an old
list are computed again after the rebuild, before they are used. A step with a due hook measures: its all-reduce
carries energies and kinetic energy too. Where a hook saved a restart or changed the cell, the run begins anew from
the rows as they are.

Invariant: every rank takes the same decisions from reduced numbers; the state advances by accepted forces only.
Layer: dynamics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nvdd_core.comm import Pending
from nvdd_core.dynamics.hooks import (
    Hook,
    HookContext,
    HookScope,
    StepInfo,
    any_begins_anew,
    any_due,
    close_hooks,
    finish_hooks,
    is_due,
    run_hooks,
)
from nvdd_core.dynamics.integrators import Integrator
from nvdd_core.dynamics.observables import degrees_of_freedom, kinetic_energy, pressure, temperature
from nvdd_core.dynamics.state import MDState
from nvdd_core.dynamics.units import GPA_PER_EV_A3
from nvdd_core.errors import InputError
from nvdd_core.runtime.distributed_model import DistributedModel
from nvdd_core.runtime.outputs import Partial
from nvdd_core.runtime.sharded import Contents, ShardedBatch

_FORCES = frozenset({"forces"})


class DomainParallel:
    """Dynamics of a sharded batch.

    Parameters
    ----------
    integrator : Integrator
    model : DistributedModel
    hooks : sequence of Hook
        Called in this order; closed when a run ends, however it ends.
    capture : {"auto", "on", "off"}
        Whether evaluations between two rebuilds are captured in CUDA graphs, where the model says that they can be.
    """

    def __init__(
        self,
        integrator: Integrator,
        model: DistributedModel,
        hooks: Sequence[Hook] = (),
        *,
        capture: str = "auto",
    ) -> None:
        self.integrator, self.model, self.hooks = integrator, model, tuple(hooks)
        self.capture = capture
        self.mesh = model.mesh
        self.timer = model.timer

    def run(self, sharded: ShardedBatch, steps: int, start_step: int = 0) -> StepInfo:
        """Advance `sharded` by `steps` steps in place (collective).

        Parameters
        ----------
        sharded : ShardedBatch
        steps : int
            0 only measures.
        start_step : int
            Steps done before, for a run that goes on; it keys the noise. Hooks are not called again for this step.

        Returns
        -------
        StepInfo
            Of the last step.

        Raises
        ------
        InputError
            On every rank, for a negative number of steps, a model that can't serve the batch, or a cell that
            was changed on rank 0 only.
        NumericalError
            On every rank, when a position or force is not finite.
        """
        if steps < 0:
            raise InputError(f"steps is {steps}: give 0 or more")
        try:
            with self.model.steady(self.capture):
                return _Run(self, sharded, start_step).advance(steps)
        finally:
            close_hooks(self.hooks)


class _Run:
    """One run's state, which `DomainParallel.run` advances."""

    def __init__(self, owner: DomainParallel, sharded: ShardedBatch, start_step: int) -> None:
        self.owner, self.sharded = owner, sharded
        self.model, self.integrator, self.timer = owner.model, owner.integrator, owner.timer
        measured = {"energy", "forces"}
        if sharded.n_systems == 1 and bool(sharded.pbc.all()) and "stress" in self.model.model.outputs:
            measured.add("stress")
        self._measured = frozenset(measured)
        self.model.check_outputs(self._measured)
        self._degrees = degrees_of_freedom(
            sharded.n_global, momentum_conserved=self.integrator.conserves_momentum
        )
        self.state = MDState(
            sharded.positions,
            sharded.velocities,
            torch.zeros_like(sharded.positions),
            sharded.masses,
            sharded.ids,
            start_step,
        )
        self._begin(check=True)
        self.integrator.init(self.state)

    def _begin(self, *, check: bool = False) -> None:
        """Make a domain of the rows as they are, keeping nothing of the one before, and evaluate (collective)."""
        cell = self.sharded.cell
        self._cell = Contents((), (cell,))
        self._volume = float(torch.linalg.det(cell[0]).abs())
        self.model.rebuild(self.sharded, check=check, anew=True)
        self._follow_rows()
        self._partial = self.model.compute(self.sharded, self._measured)
        self._take_forces()
        self._is_stale = False

    def advance(self, steps: int) -> StepInfo:
        """Do `steps` steps; return what the last one measured."""
        totals = self._reduce(None).wait()
        info = self._measured_info(totals)
        if self.state.step == 0:
            self._call_hooks(info)
        last = self.state.step + steps
        while self.state.step < last:
            if self._is_stale:
                self._begin()
            due = any_due(self.owner.hooks, self.state.step + 1) or self.state.step + 1 == last
            self.timer.next_step()
            with self.timer.phase("integrate"):
                self.integrator.first_half(self.state)
            with self.timer.phase("exchange"):  # in steady steps of GPUs ghosts get their positions here
                flag = self.model.moved_flag(self.sharded)
            if due:
                info = self._finish_measured(flag)
                self._call_hooks(info)
            else:
                self._finish_plain(flag)
        with self.timer.phase("write", rare=True):
            finish_hooks(self.owner.hooks, self._context(info))
        return info

    def _finish_plain(self, flag: torch.Tensor) -> None:
        pending = self.model.vote(flag, self.state.forces)
        if self.model.asks_first:
            rebuild = self._has_moved(pending)
            partial = self._rebuilt(_FORCES) if rebuild else self.model.compute(self.sharded, _FORCES)
        else:
            partial = self.model.compute(self.sharded, _FORCES)
            if self._has_moved(pending):
                partial = self._rebuilt(_FORCES)
        self._partial = partial
        with self.timer.phase("integrate"):
            self._take_forces()
            self.integrator.second_half(self.state)

    def _has_moved(self, pending: Pending) -> bool:
        """Return the ranks' vote; raise where it tells of a force or position that is not finite (collective)."""
        with self.timer.phase("reduce"):
            flags = pending.host(2)
        if math.isnan(flags[0]):  # the forces of the step before, or positions, which the rebuild then names
            self.model.refuse_not_finite(self.sharded, self._partial)
        return self.model.has_moved(flags)

    def _finish_measured(self, flag: torch.Tensor) -> StepInfo:
        if self.model.asks_first and self._has_moved(self.model.vote(flag, self.state.forces)):
            self._partial = self._rebuilt(self._measured)
            return self._measured_info(self._second_half_and_reduce(None))
        self._partial = self.model.compute(self.sharded, self._measured)
        velocities, step = self.state.velocities.clone(), self.state.step
        totals = self._second_half_and_reduce(flag)
        if self.model.has_moved(totals[:2].tolist()):
            self.state.velocities.copy_(velocities)
            self.state.step = step
            self._partial = self._rebuilt(self._measured)
            totals = self._second_half_and_reduce(None)
        return self._measured_info(totals)

    def _second_half_and_reduce(self, flag: torch.Tensor | None) -> torch.Tensor:
        with self.timer.phase("integrate"):
            self._take_forces()
            self.integrator.second_half(self.state)
        pending = self._reduce(flag)
        with self.timer.phase("reduce"):
            return pending.wait().cpu()

    def _rebuilt(self, wanted: frozenset[str]) -> Partial:
        """Rebuild the domain, follow the rows that moved, and evaluate (collective)."""
        self.model.rebuild(self.sharded)
        self._follow_rows()
        return self.model.compute(self.sharded, wanted)

    def _follow_rows(self) -> None:
        sharded, state = self.sharded, self.state
        state.positions, state.velocities = sharded.positions, sharded.velocities
        state.masses, state.ids = sharded.masses, sharded.ids

    def _take_forces(self) -> None:
        forces = self._partial.forces
        if forces is None:
            raise InputError("this model gives no forces, which dynamics needs")
        self.state.forces = forces.double()

    def _reduce(self, flag: torch.Tensor | None) -> Pending:
        return self.model.reduce(self._partial, flag, kinetic_energy(self.state)[None])

    def _measured_info(self, totals: torch.Tensor) -> StepInfo:
        outputs = self.model.complete(self.sharded, self._partial, totals, self._measured)
        energy, kinetic = float(outputs.energy.sum()), float(totals[-1])
        gpa = None
        if outputs.stress is not None:
            trace = float(outputs.stress[0].diagonal().sum())
            gpa = pressure(kinetic, trace, self._volume) * GPA_PER_EV_A3
        step = self.state.step
        return StepInfo(
            step, step * self.integrator.dt, energy, kinetic, temperature(kinetic, self._degrees), gpa
        )

    def _call_hooks(self, info: StepInfo) -> None:
        with self.timer.phase("write", rare=True):
            run_hooks(self.owner.hooks, self._context(info))
        step = self.state.step
        changed = not self._cell.same((), (self.sharded.cell,))
        if changed and all(h.scope is HookScope.RANK_ZERO for h in self.owner.hooks if is_due(h, step)):
            raise InputError(
                "a hook of scope RANK_ZERO changed the cell, which the other ranks can't know of; give it scope LOCAL "
                "and change the cell alike on every rank"
            )
        self._is_stale = changed or any_begins_anew(self.owner.hooks, step)

    def _context(self, info: StepInfo) -> HookContext:
        return HookContext(self.state.step, self.sharded, self.state, info, self.owner.mesh)
