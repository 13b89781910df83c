"""How the models of a composition fit together: names, weights, outputs, and which of them feeds which.

Key objects: `Wire`, `wires_between`. Invariant: what doesn't fit is refused before anything runs, naming the members.
Layer: runtime.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nvdd_core.errors import InputError, NvddError
from nvdd_core.plugins.known import suggestion
from nvdd_core.runtime import outputs as results
from nvdd_core.runtime.mlip_spec import ForceStrategy
from nvdd_core.runtime.model_api import Member, Model, members_of
from nvdd_core.spec import StrategyKind

CHARGES = "charges"
"""What is handed on without being asked for: an output of this name becomes the field of this name."""


@dataclass(frozen=True)
class Wire:
    """An output of one member that others, after it, read as a field; members by their places."""

    source: int
    output: str
    field: str
    readers: frozenset[int]


def named_members(members: Sequence[Model]) -> dict[str, Model]:
    """Return models by the names of their classes, repeated ones numbered."""
    named: dict[str, Model] = {}
    for model in members:
        name = kind = type(model).__name__
        count = 1
        while name in named:
            count += 1
            name = f"{kind}{count}"
        named[name] = model
    return named


def factors(
    names: tuple[str, ...], weights: Mapping[str, float] | Sequence[float] | None
) -> dict[str, float]:
    """Return a factor for each member.

    Raises
    ------
    InputError
    """
    given: Mapping[str, float]
    if weights is None:
        given = {}
    elif isinstance(weights, Mapping):
        given = weights
    elif len(weights) == len(names):
        given = dict(zip(names, weights, strict=True))
    else:
        raise InputError(
            f"{len(weights)} weights for {len(names)} members ({', '.join(names)}): give one for each"
        )
    for name, factor in given.items():
        _known(name, names)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
            raise InputError(f"the weight of '{name}' is {factor!r}: expected a finite number")
    return {name: float(given.get(name, 1.0)) for name in names}


def _known(name: str, names: Sequence[str]) -> int:
    """Return the place of a member; raises InputError with near names."""
    if name not in names:
        raise InputError(
            f"a composition has no member '{name}'{suggestion(name, names)}; its members: {', '.join(names)}"
        )
    return list(names).index(name)


def check_alike(members: Sequence[Member]) -> None:
    """Refuse members that can't run together.

    Raises
    ------
    InputError
    """
    if not members:
        raise InputError("a composition has no members: give at least one model")
    first = members[0]
    for member in members:
        if "/" in member.name or not member.name:
            raise InputError(f"a member is called {member.name!r}: expected a name without a slash")
        if members_of(member.model):
            raise InputError(f"member '{member.name}' is a composition itself: put all members into one")
        if member.model.dtype != first.model.dtype:
            raise InputError(
                f"member '{first.name}' computes in {first.model.dtype}, '{member.name}' in {member.model.dtype}; "
                "load all members with one dtype"
            )
        one, other = torch.device(first.model.device), torch.device(member.model.device)
        if one.type != other.type or (one.index or 0) != (other.index or 0):
            raise InputError(
                f"member '{first.name}' is on {one}, '{member.name}' on {other}; load all members on one device"
            )
        if "energy" not in member.model.outputs:
            gives = ", ".join(sorted(member.model.outputs)) or "nothing"
            raise InputError(f"member '{member.name}' gives no energy to add up; it gives: {gives}")


def extra_names(members: Sequence[Member]) -> dict[str, tuple[int, str]]:
    """Return the members' own outputs by the names that they have here: place of the member, name there."""
    own = [sorted(set(member.model.outputs) - set(results.OUTPUTS)) for member in members]
    times = Counter(name for names in own for name in names)
    return {
        name if times[name] == 1 else f"{members[i].name}/{name}": (i, name)
        for i, names in enumerate(own)
        for name in names
    }


def wires_between(members: Sequence[Member], wires: Mapping[str, str] | None) -> tuple[Wire, ...]:
    """Return the wires that are asked for, or those that go without saying.

    Raises
    ------
    InputError
    """
    asked = (
        _wires_of_charges(members)
        if wires is None
        else [_wire(members, output, field) for output, field in wires.items()]
    )
    found: list[Wire] = []
    for wire in asked:
        _refuse_given(members, wire)
        for other in found:
            if other.field == wire.field and other.readers & wire.readers:
                raise InputError(
                    f"wires: two outputs feed the field '{wire.field}' of one member; name one reader each"
                )
        found.append(wire)
    return tuple(found)


def _wires_of_charges(members: Sequence[Member]) -> list[Wire]:
    """Return a wire from each member that gives charges to those after it that could read them.

    Who gives charges reads none, and neither does who computes forces itself: see `_wire`.

    Raises
    ------
    InputError
        When more than one member gives charges to the same reader.
    """
    givers: list[int] = []
    readers: dict[int, set[int]] = {}
    for i, member in enumerate(members):
        if CHARGES in member.model.outputs:
            givers.append(i)
        elif givers and not _is_direct(member):
            if len(givers) > 1:
                raise InputError(_two_sources([members[k].name for k in givers], member.name))
            readers.setdefault(givers[0], set()).add(i)
    return [Wire(source, CHARGES, CHARGES, frozenset(those)) for source, those in readers.items()]


def _two_sources(givers: Sequence[str], reader: str) -> str:
    named = " and ".join(f"'{name}'" for name in givers)
    one = f"wires={{'{givers[0]}/{CHARGES}': '{reader}/{CHARGES}'}}"
    return (
        f"{named} all give '{CHARGES}', and '{reader}', which comes after them, could read any of them: put '{reader}' "
        f"before all but the one that it should read, or leave the others out; in Python {one} picks one, wires={{}} "
        "keeps all apart"
    )


def _wire(members: Sequence[Member], output: str, field: str) -> Wire:
    names = [member.name for member in members]
    source_name, slash, own = output.rpartition("/")
    if slash:
        sources = [_known(source_name, names)]
    else:
        sources = [i for i, member in enumerate(members) if own in member.model.outputs]
    if len(sources) > 1:
        givers = " and ".join(f"'{names[i]}'" for i in sources)
        raise InputError(
            f"wires: {givers} give '{own}'; write '{names[sources[0]]}/{own}' for the first one's"
        )
    if not sources or own not in members[sources[0]].model.outputs or own in results.OUTPUTS:
        raise InputError(
            f"wires: no member has an output '{output}' of its own; the members: {', '.join(names)}"
        )
    reader_name, slash, bare = field.rpartition("/")
    later = range(sources[0] + 1, len(members))
    # a member that computes forces itself can't say how they depend on a field, so it reads none unless it is named
    readers = [_known(reader_name, names)] if slash else [i for i in later if not _is_direct(members[i])]
    if not readers or min(readers) <= sources[0]:
        raise InputError(
            f"wires: '{output}' feeds nobody: after '{names[sources[0]]}' there is no member to read '{field}'; they "
            f"run in the order {', '.join(names)}"
        )
    return Wire(sources[0], own, bare, frozenset(readers))


def _refuse_given(members: Sequence[Member], wire: Wire) -> None:
    """Refuse to feed a member what its own options give: one of both would be ignored without a word."""
    source = members[wire.source].name
    for reader in (members[i] for i in sorted(wire.readers)):
        if wire.field in getattr(reader.model, "given_fields", ()):
            raise InputError(
                f"member '{reader.name}' has its '{wire.field}' from an option of its own, and '{wire.output}' of "
                f"member '{source}' would feed it as well: leave the option of '{reader.name}' out, or '{source}'; in "
                "Python wires={} keeps members apart"
            )


def _is_direct(member: Member) -> bool:
    """Tell whether a member computes forces itself, under the first strategy that it serves."""
    for strategy in StrategyKind:
        try:
            return member.model.distribution_spec(strategy).force_strategy is not ForceStrategy.AUTOGRAD
        except NvddError:
            continue
    return False
