"""One force evaluation of a model over all ranks.

`DistributedModel` owns the domain of the rows (ghosts, neighbour list, halo plan), keeps it up to date, runs the
model on local rows, differentiates this rank's partial energy and completes the results in one fused all-reduce.

The list is used before the ranks have agreed that it is still good: every rank's "a row moved too far" travels
in the same all-reduce as the results, and when any rank said so the results are thrown away, the domain is rebuilt
and the evaluation repeated. So a steady step has one exchange and one all-reduce, and nobody waits for a vote. The
all-reduce also tells that a row is about to have moved too far; the ranks then ask first, so that hardly ever an
evaluation is thrown away.

Invariant: the energy is never reduced before it is differentiated.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch

from nvdd_core.adapters import AdapterStatus
from nvdd_core.comm import Mesh, Pending, all_reduce_sum_symmetric
from nvdd_core.errors import InputError, NumericalError, PluginValidationError, SpecError
from nvdd_core.partition import apply_by_segment
from nvdd_core.runtime import outputs as results
from nvdd_core.runtime.batch import LocalBatch
from nvdd_core.runtime.closest import closeness
from nvdd_core.runtime.config import DomainConfig
from nvdd_core.runtime.context import DomainContext, enter_context, keep_graphs
from nvdd_core.runtime.device_memory import use_growing_segments
from nvdd_core.runtime.domain import Domain, DomainBuilder, Reach
from nvdd_core.runtime.elements import check_rows
from nvdd_core.runtime.mlip_spec import ForceStrategy, MLIPSpec
from nvdd_core.runtime.model_adapters import ModelAdapters
from nvdd_core.runtime.model_api import Model, members_of
from nvdd_core.runtime.outputs import DEFAULT_OUTPUTS, Outputs, Partial
from nvdd_core.runtime.sharded import ShardedBatch
from nvdd_core.runtime.spec_run import SpecRun, served
from nvdd_core.runtime.steady import Steady, obstacle
from nvdd_core.runtime.timer import PhaseTimer
from nvdd_core.tensor import (
    ParticleHaloConfig,
    ParticleHaloMetadata,
    RowScope,
    collect_exchanges,
)

# Part of the way to a rebuild after which the ranks ask before they evaluate.
_NEAR = 0.85


def _tied(named: Mapping[str, torch.Tensor], tie: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return real tensors with `tie`, which is zero, in their graphs."""
    return {name: t + tie.to(t.dtype) if t.is_floating_point() else t for name, t in named.items()}


def _outputs(
    energy: torch.Tensor, stress: torch.Tensor | None, partial: Partial, wanted: frozenset[str]
) -> Outputs:
    """Put completed sums and a rank's own rows together."""
    forces = None if partial.forces is None else partial.forces.double()
    node_energy = partial.node_energy if "node_energy" in wanted else None
    return Outputs(energy, forces, stress, node_energy, partial.node_virial, partial.extra)


def _detached(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach()


class DistributedModel:
    """Evaluates one model over the ranks of a mesh.

    Parameters
    ----------
    model : Model
    config : DomainConfig, optional
    mesh : Mesh, optional
        Default: one rank.
    spec : MLIPSpec, optional
        Default: what the model declares for the strategy. Of a composition, each member's own is used.

    Attributes
    ----------
    timer : PhaseTimer
    n_rebuilds : int
        Domains built so far.
    rebuild_is_near : bool
        Whether a row of any rank was about to have moved too far when the ranks last voted; the same on every rank.
    """

    def __init__(
        self,
        model: Model,
        config: DomainConfig | None = None,
        mesh: Mesh | None = None,
        *,
        spec: MLIPSpec | None = None,
    ) -> None:
        self.model = model
        self.config = config if config is not None else DomainConfig()
        self.mesh = mesh if mesh is not None else Mesh.single(model.device)
        use_growing_segments(self.mesh.device.type)
        if spec is not None and members_of(model):
            raise SpecError(
                "a composition runs each member by the member's own spec; give none for the whole"
            )
        declared = model.distribution_spec(self.config.strategy) if spec is None else spec
        self.spec = served(declared, self.config.strategy)
        self._run = SpecRun(model, self.spec)
        self._adapters = ModelAdapters(model, self.spec, self.mesh)
        self.timer = PhaseTimer(self.mesh.device)
        self.n_rebuilds = 0
        looking = [member.model for member in members_of(model)] or [model]
        reaches = [Reach(m.cutoff, m.layers, m.neighbor_form) for m in looking]
        self._builder = DomainBuilder(self.config, self.mesh, reaches, self.timer)
        self._domain: Domain | None = None
        self._halo: ParticleHaloMetadata | None = None
        self._halo_config = ParticleHaloConfig(self.mesh, self._builder.width)
        self._ones = torch.ones(3, dtype=torch.float64, device=self.mesh.device)
        self._steady = Steady(self.mesh, self.timer, "off", self.spec.compile_policy)
        self.rebuild_is_near = False
        reach = 0.5 * self.config.skin
        self._reaches = torch.tensor([reach, _NEAR * reach], dtype=torch.float64, device=self.mesh.device)

    # -- the whole evaluation ------------------------------------------------------------------------------

    def __call__(self, sharded: ShardedBatch, outputs: Iterable[str] = DEFAULT_OUTPUTS) -> Outputs:
        """Evaluate `sharded` (collective); rows may move between ranks and be reordered in place.

        Raises
        ------
        InputError
            On every rank, if there is no such output, or the model lacks it or an element.
        NumericalError
            On every rank, if a result is not finite; names the first atom at fault.
        """
        wanted = results.wanted_names(outputs)
        self.check_outputs(wanted)
        current = self.is_current(sharded)
        known = not current or self.asks_first  # before the evaluation, that the list is good
        if not current:
            self.rebuild(sharded, check=True)
        elif known and not self._unmoved(sharded):
            self.rebuild(sharded)
        flag = None if known else self.moved_flag(sharded)
        partial = self.compute(sharded, wanted)
        totals = self.reduce(partial, flag).wait()
        if flag is not None and self.has_moved(totals[:2].tolist()):
            self.rebuild(sharded)
            partial = self.compute(sharded, wanted)
            totals = self.reduce(partial, None).wait()
        return self.complete(sharded, partial, totals, wanted)

    def is_current(self, sharded: ShardedBatch) -> bool:
        """Tell whether there is a domain for these rows (the same answer on every rank).

        What one rank alone may have changed, `moved_flag` tells and the ranks vote on.
        """
        domain = self._domain
        return (
            domain is not None
            and domain.version == sharded.version
            and domain.reference.shape == sharded.positions.shape
        )

    @property
    def domain(self) -> Domain:
        """The domain of the last evaluation."""
        if self._domain is None:
            raise InputError("no domain yet: evaluate first")
        return self._domain

    # -- its parts, for runners that put other work between them -------------------------------------------

    def rebuild(self, sharded: ShardedBatch, *, check: bool = False, anew: bool = False) -> None:
        """Move rows to their owners, choose ghosts, list neighbours (collective).

        `check` looks at the elements first; `anew` lets the result, down to the order of rows, depend on nothing
        but the rows themselves.
        """
        if check:
            check_rows(self.model, sharded)
        self._steady.begin(anew=anew)
        self._domain = self._builder.build(sharded, anew=anew)
        self._halo = ParticleHaloMetadata(self._domain.plan)
        self.n_rebuilds += 1
        self.rebuild_is_near = False

    def check_outputs(self, wanted: frozenset[str]) -> None:
        """Raise InputError for outputs that don't exist or that the model lacks."""
        results.check_names(wanted, frozenset(self.model.outputs), self.spec)

    @contextmanager
    def steady(self, mode: str) -> Iterator[None]:
        """Make evaluations between two rebuilds cheaper in the body, where nothing but positions may change.

        Parameters
        ----------
        mode : {"auto", "on", "off"}
            Whether they are captured in CUDA graphs, see `nvdd_core.runtime.steady`.

        Raises
        ------
        InputError
            When there is no such mode.
        """
        before = self._steady
        self._steady = Steady(self.mesh, self.timer, mode, self.spec.compile_policy)
        try:
            yield
        finally:
            self._steady = before
            before.begin()

    @property
    def capture_obstacle(self) -> str | None:
        """Why no evaluation can be captured in a CUDA graph, or None."""
        return obstacle(self.mesh, self.spec.compile_policy)

    def moved_flag(self, sharded: ShardedBatch) -> torch.Tensor:
        """Return two numbers above zero if this rank's list is out of date, or almost (collective in `steady`).

        It is when a row has moved further than half the skin. Positions are compared as they are, without minimum
        image: a row folded by a lattice vector has moved.
        """
        missing = self._steady.update(self.domain, sharded.positions, self.model.dtype)
        flag = self._moved(sharded)
        return flag if missing is None else flag + missing

    def _moved(self, sharded: ShardedBatch) -> torch.Tensor:
        moved = sharded.positions - self.domain.reference
        if not sharded.has(self.domain.contents):
            return moved.new_ones(2)  # what ghosts copied has changed here, perhaps on this rank only
        if moved.shape[0] == 0:
            return moved.new_zeros(2)
        # a position that is not finite makes this NaN, which is not zero either; the rebuild then names it
        if moved.is_cuda:  # fewest launches
            furthest = torch.linalg.vector_norm(moved, dim=1).amax()
        else:  # a product with ones takes a sixth of what sum(1) takes
            furthest = (moved.square_() @ self._ones).amax().sqrt_()
        beyond: torch.Tensor = (furthest - self._reaches).clamp_min_(0.0)
        return beyond

    @property
    def asks_first(self) -> bool:
        """Whether asking before an evaluation is cheaper than to risk one for nothing; the same on every rank.

        Without a skin any move rebuilds.
        """
        return self.rebuild_is_near or self.config.skin == 0.0

    def has_moved(self, flags: Sequence[float]) -> bool:
        """Take the summed numbers of `moved_flag`: tell whether a row of any rank has moved too far."""
        moved, near = flags
        self.rebuild_is_near = near != 0.0
        return moved != 0.0

    def _unmoved(self, sharded: ShardedBatch) -> bool:
        """Tell whether the list is still good on every rank (collective)."""
        return not self.has_moved(self.mesh.start_vote(self.moved_flag(sharded)).host(2))

    def vote(self, flag: torch.Tensor, forces: torch.Tensor) -> Pending:
        """Begin to sum `flag` over ranks, NaN if a force is not finite; read it by `Pending.host` (collective)."""
        with self.timer.phase("reduce"):
            return self.mesh.start_vote(torch.add(flag, forces.sum(), alpha=0.0))

    def compute(self, sharded: ShardedBatch, wanted: frozenset[str]) -> Partial:
        """Run the model on local rows and return this rank's share of the results (collective).

        Where `moved_flag` was asked before, positions must not have changed since.
        """
        direct = self.spec.force_strategy is ForceStrategy.DIRECT
        way = self._compute_direct if direct else self._compute_by_autograd

        def evaluate(domain: Domain, local: torch.Tensor) -> Partial:
            with self._on(domain):
                return way(sharded, local, wanted)

        return self._steady.compute(self.domain, sharded.positions, self.model.dtype, wanted, evaluate)

    @contextmanager
    def _on(self, domain: Domain) -> Iterator[None]:
        """Evaluate on `domain` in the body, which holds the rows of the current one."""
        kept = self._domain, self._halo
        if domain is not self._domain:
            self._domain, self._halo = domain, ParticleHaloMetadata(domain.plan)
        try:
            yield
        finally:
            self._domain, self._halo = kept

    def reduce(
        self, partial: Partial, flag: torch.Tensor | None, extra: torch.Tensor | None = None
    ) -> Pending:
        """Begin the fused all-reduce of ``[flag (2), energy (S), virial (9 S), extra]`` (collective).

        The flags become NaN if a force is not finite.
        """
        with self.timer.phase("reduce"):
            reference = self.domain.reference
            zero = reference.new_zeros(())
            n_systems = self.domain.cell.shape[0]
            flag = zero.expand(2) if flag is None else flag
            if partial.forces is not None:
                flag = torch.add(flag, partial.forces.sum(), alpha=0.0)
            energy = zero.expand(n_systems) if partial.energy is None else partial.energy
            pieces = [flag.double(), energy]
            if partial.virial is not None:
                pieces.append(partial.virial.reshape(-1).double())
            if extra is not None:
                pieces.append(extra)
            return self.mesh.start_all_reduce_sum_(torch.cat(pieces))

    def complete(
        self, sharded: ShardedBatch, partial: Partial, totals: torch.Tensor, wanted: frozenset[str]
    ) -> Outputs:
        """Make outputs of this rank's share and the reduced vector."""
        n_systems = sharded.n_systems
        energy = totals[2 : 2 + n_systems].clone()
        if not bool(torch.isfinite(totals.sum())):
            self.refuse_not_finite(sharded, partial)
            raise NumericalError("the energy is not a finite number, though every force is; check the model")
        stress = None
        if partial.virial is not None:
            virial = totals[2 + n_systems : 2 + 10 * n_systems].view(n_systems, 3, 3)
            stress = self._stress(virial, sharded)
        self._refuse_extras(partial)
        return _outputs(energy, stress, partial, wanted)

    def _refuse_extras(self, partial: Partial) -> None:
        """Raise on every rank if an output of the model's own is not finite on any rank (collective)."""
        for name, value in partial.extra.items():
            bad = int(not bool(torch.isfinite(value).all()))
            ranks = [rank for rank, (n,) in enumerate(self.mesh.all_gather_ints([bad])) if n]
            if ranks:
                raise NumericalError(f"the model's output '{name}' is not finite, on rank {ranks[0]} first")

    def _stress(self, virial: torch.Tensor, sharded: ShardedBatch) -> torch.Tensor:
        volume = torch.linalg.det(sharded.cell).abs().to(virial.device)
        if bool((volume < 1e-12).any()):
            raise InputError("stress needs a cell with a volume: the cell of a system is singular")
        stress: torch.Tensor = 0.5 * (virial + virial.mT) / volume[:, None, None]
        return stress

    def refuse_not_finite(self, sharded: ShardedBatch, partial: Partial) -> None:
        """Raise on every rank if a row of any rank has a result that is not finite (collective)."""
        bad = torch.zeros(sharded.n_owned, dtype=torch.bool, device=sharded.ids.device)
        for t in (partial.forces, partial.node_energy):
            if t is not None:
                bad |= ~torch.isfinite(t.reshape(t.shape[0], -1)).all(1)
        first = min([*sharded.ids[bad].tolist(), sharded.n_global])
        named = min(row[0] for row in self.mesh.all_gather_ints([first]))
        if named < sharded.n_global:
            close = closeness(self.domain, sharded)
            why = close or "are atoms on top of each other, or is the time step too large?"
            raise NumericalError(f"atom {named} has a force or energy that is not finite; {why}")

    # -- two ways to forces --------------------------------------------------------------------------------

    def _compute_direct(self, sharded: ShardedBatch, local: torch.Tensor, wanted: frozenset[str]) -> Partial:
        domain = self.domain
        with self._installed(), torch.no_grad(), enter_context(self._context()), self.timer.phase("model"):
            out = self._forward(sharded, local, domain.box.cell.to(local.dtype), wanted, domain.fields)
            rows = self._rows(out, ("forces", "node_energy", "node_virial"))
            energy = self._energy(out, rows, sharded) if out.keys() & {"energy", "node_energy"} else None
            extra = self._extra(out, wanted)
            virial = out.get("virial")
            if virial is not None:
                virial = results.system_share("stress", virial, self.spec, domain.plan)
        return Partial(
            energy,
            rows.get("forces"),
            virial,
            rows.get("node_energy"),
            rows.get("node_virial"),
            extra,
        )

    def _compute_by_autograd(
        self, sharded: ShardedBatch, local: torch.Tensor, wanted: frozenset[str]
    ) -> Partial:
        found = self._differentiate(sharded, local, wanted)
        return Partial(
            energy=_detached(found.energy),
            forces=_detached(found.forces),
            virial=found.virial,
            node_energy=_detached(found.node_energy),
            node_virial=_detached(found.node_virial),
            extra={name: t.detach() for name, t in found.extra.items()},
        )

    def _differentiate(
        self, sharded: ShardedBatch, local: torch.Tensor | None, wanted: frozenset[str]
    ) -> Partial:
        """Return this rank's share by autograd at `local` positions; without, so that it goes on (collective)."""
        domain, keep_graph = self.domain, local is None
        derive = bool(wanted & {"forces", "stress"})
        # The context outlives the forward pass: checkpointed layers run again while gradients are taken.
        graph = derive or keep_graph
        with self._installed(), enter_context(self._context()), torch.set_grad_enabled(graph):
            fed: dict[str, torch.Tensor] = {}
            if local is None:
                target = (sharded.positions - domain.offset).to(self.model.dtype).requires_grad_()
                local = domain.plan.forward(target)
                given = sharded.fields_with_gradients(self.mesh)
                fed = {name: domain.plan.forward(rows) for name, rows in given.items()}
            else:
                local = target = local.detach().requires_grad_(graph)
            with self.timer.phase("model"):
                cell = domain.box.cell.to(local.dtype)
                targets = [target]
                if "stress" in wanted:
                    strain = cell.new_zeros(cell.shape).requires_grad_(True)
                    targets.append(strain)
                    symmetric = 0.5 * (strain + strain.mT)
                    local = local + apply_by_segment(local, symmetric, domain.system)
                    cell = cell + cell @ symmetric
                with collect_exchanges(anchor=local) as exchanges:
                    out = self._forward(sharded, local, cell, wanted, domain.fields | fed)
                    rows = self._rows(out, self._autograd_rows)
                    energy = self._energy(out, rows, sharded)
                    extra = self._extra(out, wanted)
                if derive and not energy.requires_grad:
                    results.refuse_detached(self.mesh.rank, domain.neighbors.n_edges)
                # A rank whose rows see no ghost must take part in every reverse exchange all the same, and, where
                # the graph is kept, in those of the second derivative: squares of no entries have one.
                nothing = [t.reshape(-1)[:0] for t in (local, *exchanges, *fed.values())]
                if keep_graph:
                    tie = torch.stack([t.square().sum().to(local.dtype) for t in nothing]).sum()
                    energy = energy + tie
                    rows, extra = _tied(rows, tie), _tied(extra, tie)
                partial = Partial(energy, None, None, rows.get("node_energy"), rows.get("node_virial"), extra)
                if not derive:
                    return partial
                total = energy.sum() + (0.0 if keep_graph else sum(t.sum() for t in nothing))
                grads = torch.autograd.grad(total, targets, allow_unused=True, create_graph=keep_graph)
            gradient = torch.zeros_like(target) if grads[0] is None else grads[0]
            forces = (gradient if keep_graph else domain.plan.reverse(gradient)).neg()
            virial = None
            if "stress" in wanted:
                virial = torch.zeros_like(cell) if grads[1] is None else grads[1]
            if self.spec.force_strategy is ForceStrategy.MIXED:
                forces, virial = self._with_given(out, rows, forces, virial)
            return replace(partial, forces=forces, virial=virial)

    def _with_given(
        self,
        out: dict[str, torch.Tensor],
        rows: dict[str, torch.Tensor],
        forces: torch.Tensor,
        virial: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add what the model gave as forces and virial to the gradients."""
        if "forces" in rows:
            forces = forces + rows["forces"]
        if virial is not None:
            given = results.system_share("stress", out["virial"], self.spec, self.domain.plan)
            virial = virial.double() + given
        return forces, virial

    def differentiable(self, sharded: ShardedBatch, outputs: Iterable[str] = DEFAULT_OUTPUTS) -> Outputs:
        """Evaluate and keep the graph, for gradients with respect to parameters, positions and fields (collective).

        Each rank computes its own share of the loss: sums over its owned rows, and terms of the systems' energies
        and stresses, which every rank has in full, on one rank only, times zero on the others: their adjoints are
        sums over ranks. It then differentiates its share, all ranks together; gradients with respect to parameters
        are summed over ranks afterwards. Those with respect to positions and to fields that require gradients, rows of
        `sharded`, are complete on the rank that owns a row. The domain must be current.

        Where layers are under ``torch.utils.checkpoint``, differentiate inside `differentiating`, since they run again
        then and have to exchange again.

        Raises
        ------
        InputError
            If the rows have moved since the last evaluation, a field requires gradients on some ranks only, or the
            model computes forces itself.
        """
        wanted = results.wanted_names(outputs)
        self.check_outputs(wanted)
        if self.spec.force_strategy is not ForceStrategy.AUTOGRAD:
            raise InputError(
                f"this model computes forces itself (ForceStrategy.{self.spec.force_strategy.name}): they have no "
                "graph to keep"
            )
        if not self.is_current(sharded) or not self._unmoved(sharded):
            raise InputError(
                "the rows have moved since the last evaluation: evaluate once, then call differentiable"
            )
        if self.mesh.size > 1:
            keep_graphs()
        partial = self._differentiate(sharded, None, wanted)
        if partial.energy is None:
            raise PluginValidationError("the model gave no energy")
        energy = all_reduce_sum_symmetric(partial.energy, self.mesh)
        stress = None
        if partial.virial is not None:
            virial = all_reduce_sum_symmetric(partial.virial.double(), self.mesh)
            stress = self._stress(virial, sharded)
        return _outputs(energy, stress, partial, wanted)

    @contextmanager
    def differentiating(self, sharded: ShardedBatch) -> Iterator[None]:
        """Make what `differentiable` gave differentiable also through checkpointed layers, inside the body."""
        with self._installed(), enter_context(self._context()):
            yield

    @property
    def _autograd_rows(self) -> tuple[str, ...]:
        rows = ("node_energy", "node_virial")
        return (*rows, "forces") if self.spec.force_strategy is ForceStrategy.MIXED else rows

    def _forward(
        self,
        sharded: ShardedBatch,
        local: torch.Tensor,
        cell: torch.Tensor,
        wanted: frozenset[str],
        fields: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        domain = self.domain
        batch = LocalBatch(
            positions=local,
            cell=cell,
            pbc=sharded.pbc,
            numbers=domain.numbers,
            system=domain.system,
            ids=domain.ids,
            n_owned=domain.plan.n_owned,
            neighbors=domain.neighbors,
            fields=fields,
            requested=wanted,
            parts=domain.parts,
            near=domain.near,
        )
        return self._run.forward(batch)

    def _installed(self) -> AbstractContextManager[None]:
        return self._adapters.installed(self._scope())

    def adapter_status(self) -> tuple[AdapterStatus, ...]:
        """Return the state of every adapter that the model's spec declares, with its plugin."""
        return self._adapters.status()

    def _context(self) -> DomainContext:
        domain, scatter = self.domain, self.spec.dispatch_rules.scatter
        scattered = self.mesh.size > 1
        strategy, may_move = self.config.strategy, 0.5 * self.config.skin
        return DomainContext(
            is_distributed=scattered,
            mesh=self.mesh,
            plan=domain.plan,
            strategy=strategy,
            scatter=scatter,
            rows=self._scope(),
            may_move=may_move,
            padded=domain.real is not None,
        )

    def _scope(self) -> RowScope:
        return RowScope(self._halo, self._halo_config, self.spec, self.domain.cell.shape[0])

    def _rows(self, out: dict[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return per-row results on owned rows (collective where the spec says that they are shares)."""
        plan = self.domain.plan
        return {name: results.owned_rows(name, out[name], self.spec, plan) for name in names if name in out}

    def _extra(self, out: dict[str, torch.Tensor], wanted: frozenset[str]) -> dict[str, torch.Tensor]:
        names = sorted(wanted - set(results.OUTPUTS))
        return {name: results.combine(name, out[name], self.spec, self.domain.plan) for name in names}

    def _energy(
        self, out: dict[str, torch.Tensor], rows: dict[str, torch.Tensor], sharded: ShardedBatch
    ) -> torch.Tensor:
        """Return this rank's share of every system's energy, float64 (S,)."""
        domain = self.domain
        if "node_energy" in rows:
            energies = rows["node_energy"]
            if domain.real is not None:
                energies = torch.where(domain.real, energies, 0.0)
            return results.by_system(energies, domain.system[: domain.plan.n_owned], sharded.n_systems)
        if domain.real is not None:
            raise PluginValidationError(
                "the model's spec declares CompilePolicy(pads=True), which needs node_energy, and the model gave energy"
            )
        return results.system_share("energy", out["energy"], self.spec, self.domain.plan)

    # -- reports -------------------------------------------------------------------------------------------

    def report(self) -> list[dict[str, int]]:
        """Return owned, ghost and edge counts of every rank (collective)."""
        plan = self.domain.plan
        mine = [plan.n_owned, plan.n_ghost, self.domain.neighbors.n_edges]
        return [
            {"rank": rank, "owned": owned, "ghost": ghost, "edges": edges}
            for rank, (owned, ghost, edges) in enumerate(self.mesh.all_gather_ints(mine))
        ]
