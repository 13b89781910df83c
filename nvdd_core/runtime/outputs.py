"""What an evaluation gives: names and shapes of outputs, and how the ranks' values become one.

Five outputs are known to the framework; any other a model may name in its spec, and its `OutputSpec` says what dim 0
counts and how the ranks' values are combined.

Invariant: a result whose shape doesn't fit what was declared is refused on the rank that has it, never sliced to fit.
Layer: runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from nvdd_core.comm import HaloPlan, Mesh, all_reduce_sum_symmetric
from nvdd_core.errors import InputError, PluginValidationError, SpecError
from nvdd_core.plugins.known import suggestion
from nvdd_core.runtime.mlip_spec import ForceStrategy, MLIPSpec
from nvdd_core.spec import OutputKind, Reduce
from nvdd_core.tensor import ShardTensor
from nvdd_core.tensor.exchanges import exchanged

OUTPUTS = ("energy", "forces", "stress", "node_energy", "node_virial")
DEFAULT_OUTPUTS = frozenset({"energy", "forces"})
_ROWS = ("node_energy", "forces", "node_virial")


@dataclass(frozen=True)
class Outputs:
    """Results of an evaluation.

    Attributes
    ----------
    energy : Tensor, shape (S,), float64
        eV, of the whole systems, the same on every rank. Always there, whatever was asked for.
    forces : Tensor, shape (n_owned, 3), float64, or None
        eV/Angstrom, in the order of the rows of the ShardedBatch after the call. What follows is so, too, and None
        where it was not asked for.
    stress : Tensor, shape (S, 3, 3), float64, or None
        (1/V) dE/d(strain), eV/Angstrom^3, tensile positive.
    node_energy : Tensor, shape (n_owned,), or None
        eV.
    node_virial : Tensor, shape (n_owned, 3, 3), or None
        Each row's share of dE/d(strain), eV, as the model shares it out.
    extra : dict of str to Tensor
        Further outputs that were asked for: (n_owned, *F) for one per row, (S, *F) for one per system.
    """

    energy: torch.Tensor
    forces: torch.Tensor | None
    stress: torch.Tensor | None
    node_energy: torch.Tensor | None
    node_virial: torch.Tensor | None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, torch.Tensor]:
        """Return what there is, by name."""
        known = {name: getattr(self, name) for name in OUTPUTS}
        return {name: value for name, value in known.items() if value is not None} | dict(self.extra)


@dataclass(frozen=True)
class Partial:
    """One rank's share of the results, before any sum over ranks; shapes as in `Outputs`."""

    energy: torch.Tensor | None
    forces: torch.Tensor | None
    virial: torch.Tensor | None
    node_energy: torch.Tensor | None
    node_virial: torch.Tensor | None = None
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


def wanted_names(outputs: Iterable[str]) -> frozenset[str]:
    """Return the outputs asked for, and the energy, which is always given.

    Raises
    ------
    InputError
        When a single word was given, whose letters would be taken for outputs.
    """
    if isinstance(outputs, str):
        raise InputError(
            f"outputs is the text {outputs!r}: expected a set or list of names, such as {{{outputs!r}}}"
        )
    return frozenset(outputs) | {"energy"}


def check_names(wanted: frozenset[str], available: frozenset[str], spec: MLIPSpec) -> None:
    """Raise for outputs that don't exist, that the model lacks or that its spec says nothing of.

    Raises
    ------
    InputError, SpecError
    """
    known = [*OUTPUTS, *sorted(available - set(OUTPUTS))]
    for name in sorted(wanted - set(known)):
        raise InputError(
            f"there is no output '{name}'{suggestion(name, known)}; the outputs: {', '.join(known)}"
        )
    for name in sorted(wanted - available):
        has = ", ".join(output for output in known if output in available)
        raise InputError(f"this model gives no '{name}'; it gives: {has or 'nothing'}")
    for name in sorted(wanted - set(OUTPUTS)):
        if spec.output(name).kind is OutputKind.UNKNOWN:
            raise SpecError(
                f"the model's spec says nothing of its output '{name}', so the ranks' values can't be combined: add "
                f"outputs={{'{name}': OutputSpec(OutputKind.PER_NODE)}}, or what it is, to the spec"
            )


def expected(wanted: frozenset[str], spec: MLIPSpec, given: Iterable[str]) -> set[str]:
    """Return what the model's forward has to give for the outputs `wanted`, knowing what it did give."""
    names = set(wanted - {"energy", "forces", "stress", "node_energy"})
    rows = {"node_energy"} if "node_energy" in wanted or "energy" not in given else {"energy"}
    if spec.force_strategy is ForceStrategy.AUTOGRAD:
        return names | rows
    stress = {"virial"} if "stress" in wanted else set()
    needs_energy = spec.force_strategy is ForceStrategy.MIXED or wanted & {"energy", "node_energy"}
    return {*names, *(wanted & {"forces"}), *stress, *(rows if needs_energy else set())}


def results_of(out: object, wanted: frozenset[str], spec: MLIPSpec) -> dict[str, torch.Tensor]:
    """Return what of a model's results was asked for, as plain tensors.

    Raises
    ------
    PluginValidationError
        When forward gave no dictionary of tensors, lacks something, or gave energies that are no real numbers.
    """
    if not isinstance(out, Mapping):
        raise PluginValidationError(
            f"the model's forward gave {type(out).__name__}; expected a dictionary of tensors"
        )
    needed = expected(wanted, spec, out)
    missing = needed - out.keys()
    if missing:
        raise PluginValidationError(
            f"the model's forward gave no '{min(missing)}', which it declares; it gave: {', '.join(map(str, out))}"
        )
    found: dict[str, torch.Tensor] = {}
    for name in (
        wanted | needed | {"node_energy"} | ({"virial"} if "stress" in wanted else set())
    ) & out.keys():
        value = out[name]
        if not isinstance(value, torch.Tensor):
            raise PluginValidationError(
                f"the model gave '{name}' as {type(value).__name__}; expected a tensor"
            )
        if name not in wanted - set(OUTPUTS) and not value.is_floating_point():
            raise PluginValidationError(
                f"the model gave '{name}' of {value.dtype}; expected floating point numbers"
            )
        found[name] = value.to_local() if isinstance(value, ShardTensor) else value
    return found


def refuse_detached(rank: int, n_edges: int) -> None:
    """Refuse an energy without a graph, whose derivative would be taken for zero.

    A rank without edges may have energies that don't depend on where its rows are.

    Raises
    ------
    PluginValidationError
    """
    if n_edges:
        raise PluginValidationError(
            f"rank {rank}: the model's energy does not depend on positions, although there are edges: something in its "
            "forward detaches it (detach, .data, numpy, torch.no_grad, a kernel without a gradient). A model that "
            "computes forces itself declares ForceStrategy.DIRECT"
        )


def check_agreement(out: Mapping[str, torch.Tensor], spec: MLIPSpec, mesh: Mesh) -> None:
    """Refuse results that are declared complete on every rank and differ between ranks (collective).

    Raises
    ------
    PluginValidationError
        On every rank.
    """
    for name in sorted(out):
        output = spec.output("stress" if name == "virial" else name)
        per_row = output.kind in (OutputKind.PER_NODE, OutputKind.UNKNOWN)
        whole = not per_row and output.combined is not Reduce.ALL_REDUCE
        if not whole:
            continue
        mine = out[name].detach().double().reshape(-1)
        seen = mesh.all_reduce_max_(torch.cat([mine, -mine]))
        highest, lowest = seen[: mine.numel()], -seen[mine.numel() :]
        precise = 1e-9 if out[name].dtype is torch.float64 else 1e-4
        if bool((highest - lowest > precise * (1.0 + highest.abs())).any()):
            raise PluginValidationError(
                f"the model's '{name}' is declared complete on every rank, but differs between ranks by up to "
                f"{float((highest - lowest).max()):.3g}: it is each rank's share (declare Reduce.ALL_REDUCE), or lacks "
                "a sum over ranks (system_sum)"
            )


def check_shapes(out: Mapping[str, torch.Tensor], spec: MLIPSpec, plan: HaloPlan, n_systems: int) -> None:
    """Refuse results of the wrong shape, which a slice or a sum would turn into wrong numbers.

    Raises
    ------
    PluginValidationError
        Naming rank, output and both shapes.
    """
    tails = {"node_energy": (), "forces": (3,), "node_virial": (3, 3)}
    fixed = {"energy": (n_systems,), "virial": (n_systems, 3, 3)}
    for name, value in out.items():
        found, output = tuple(value.shape), spec.output(name)
        if name in fixed:
            allowed = [fixed[name]]
        elif spec.per_row(name):
            tail = tails.get(name, found[1:])
            partial = output.combined is Reduce.ALL_REDUCE
            counts = (plan.n_local,) if partial else (plan.n_owned,)
            allowed = [(n, *tail) for n in counts]
            if not partial and name != "forces":  # rows of ghosts are copies then, and left out
                allowed.append((plan.n_local, *tail))
        elif output.kind is OutputKind.PER_GRAPH:
            allowed = [(n_systems, *found[1:])]
        else:
            continue
        if found not in allowed:
            hint = ""
            if name in _ROWS and found == (plan.n_local, *tails[name]):
                hint = (
                    "; if they are shares on local rows, to be summed into owners, declare "
                    f"outputs={{'{name}': OutputSpec(OutputKind.PER_NODE, Reduce.ALL_REDUCE)}}"
                )
            raise PluginValidationError(
                f"rank {plan.mesh.rank}: the model gave '{name}' with shape {found}; expected "
                f"{' or '.join(map(str, dict.fromkeys(allowed)))} ({plan.n_owned} owned rows, {plan.n_ghost} ghosts, "
                f"{n_systems} systems){hint}"
            )


def owned_rows(name: str, value: torch.Tensor, spec: MLIPSpec, plan: HaloPlan) -> torch.Tensor:
    """Return owned rows of a per-row result: shares are summed into owners (collective), copies are left out."""
    if spec.output(name).combined is Reduce.ALL_REDUCE:
        return exchanged(plan.reverse, value)
    return value[: plan.n_owned]


def combine(name: str, value: torch.Tensor, spec: MLIPSpec, plan: HaloPlan) -> torch.Tensor:
    """Return an output beyond the five, completed over ranks as its spec says (collective, differentiable)."""
    output = spec.output(name)
    if output.kind is OutputKind.PER_NODE:
        return owned_rows(name, value, spec, plan)
    if output.combined is Reduce.ALL_REDUCE:
        return exchanged(lambda share: all_reduce_sum_symmetric(share, plan.mesh), value)
    return value


def by_system(rows: torch.Tensor, system: torch.Tensor, n_systems: int) -> torch.Tensor:
    """Sum owned rows by system, in float64 (S,)."""
    if n_systems == 1:
        return rows.double().sum()[None]
    return rows.new_zeros(n_systems, dtype=torch.float64).index_add(0, system, rows.double())


def system_share(name: str, value: torch.Tensor, spec: MLIPSpec, plan: HaloPlan | None) -> torch.Tensor:
    """Return this rank's share (S, ...), float64, of what the model gave per system.

    A value that is complete on every rank counts once, on rank 0. Of an energy, the sums over ranks inside the model,
    whose adjoints are sums over ranks too, then give every rank its derivative.
    """
    value = value.double()
    whole = spec.output(name).combined is Reduce.OWNED_ONLY
    if whole and plan is not None and plan.mesh.rank > 0:
        return value * 0.0
    return value
