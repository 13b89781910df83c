"""Several models in one name, ``mace+0.5*dftd3``, and which of them an option is for.

Key objects: `read_model`, whose `Term` s name models as everywhere else; `shared_out`, which deals options out.
Invariant: a single model's name, as it is, is one term, and its options are untouched. Layer: plugins.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvdd_core.errors import InputError
from nvdd_core.plugins.known import suggestion

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_GIVEN = frozenset({"dtype", "device"})  # by nvdd, to every loader

# A model of a plugin, with the plugin's name where that is needed, or a loader in a module.
_MODEL = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_.-]+(?::[A-Za-z_][A-Za-z0-9_.]*)?")


@dataclass(frozen=True)
class Term:
    """One model of a composition.

    Attributes
    ----------
    name : str
        What it is called there; options and messages use it.
    model : str
        As for a single model.
    weight : float
        Factor of its energy.
    """

    name: str
    model: str
    weight: float = 1.0


def is_composition(model: str) -> bool:
    """Tell whether a name stands for a composition; the path of a file may hold the same signs."""
    if not {"+", "*"} & set(model):
        return False
    if ":" not in model:
        return True
    return ".py:" not in model and all(_MODEL.fullmatch(text) for _, text in _pieces(model))


def read_model(model: str) -> tuple[Term, ...]:
    """Return the terms of ``name``, ``name+name`` or ``name+0.5*name``; a repeated name is called ``name2``.

    Raises
    ------
    InputError
        When a term is no model or its weight no number.
    """
    if not is_composition(model):
        return (Term(model, model),)
    terms: list[Term] = []
    for weight, text in _pieces(model):
        if not _MODEL.fullmatch(text):
            raise InputError(
                f"--model {model!r}: {text!r} is no model; expected NAME+NAME, with a weight NAME+0.5*NAME"
            )
        name = _free(re.split(r"[/:]", text)[-1], [term.name for term in terms])
        terms.append(Term(name, text, _number(weight, model)))
    return tuple(terms)


def _pieces(model: str) -> list[tuple[str, str]]:
    """Split into texts of (weight, model)."""
    pieces: list[tuple[str, str]] = []
    for text in re.split(r"(?<![0-9.][eE])\+", model):  # the sign of an exponent is no plus: 1e+3*lj
        weight, star, name = text.rpartition("*")
        pieces.append((weight.strip() if star else "1", name.strip()))
    return pieces


def _number(text: str, model: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise InputError(
            f"--model {model!r}: the weight {text!r} is no finite number; write it as in 0.5*NAME"
        )
    return weight


def _free(name: str, taken: Iterable[str]) -> str:
    count, free, used = 1, name, set(taken)
    while free in used:
        count += 1
        free = f"{name}{count}"
    return free


def options_of(loader: Callable[..., object]) -> tuple[dict[str, bool], bool] | None:
    """Return a loader's options by name, each with whether it must be given, and whether it takes others as well.

    None for a loader without a readable signature.
    """
    try:
        parameters = inspect.signature(loader).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {p.name: p.default is p.empty for p in parameters if p.kind in _NAMED and p.name not in _GIVEN}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def check_options(model: str, options: Mapping[str, Any], loader: Callable[..., object]) -> None:
    """Refuse options that the loader of `model` does not take, and the lack of those that it needs.

    Raises
    ------
    InputError
    """
    for key in options:
        _refuse_given(key)
    found = options_of(loader)
    if found is None:  # it checks for itself
        return
    named, open_ended = found
    unknown = [] if open_ended else [name for name in options if name not in named]
    if unknown:
        raise InputError(
            f"model '{model}' has no option '{unknown[0]}'{suggestion(unknown[0], named)}; its options: "
            f"{', '.join(named) or 'none'}"
        )
    missing = [name for name, required in named.items() if required and name not in options]
    if missing:
        raise InputError(f"model '{model}' needs the option '{missing[0]}'")


def _refuse_given(key: str) -> None:
    if key in _GIVEN:
        raise InputError(f"'{key}' is no option of a model; give --{key}, in Python {key}=...")


def qualified(key: str, names: Iterable[str]) -> tuple[str, str] | None:
    """Return member and option of ``member.option``; None where `key` names no member."""
    for name in sorted(names, key=len, reverse=True):
        if key.startswith(f"{name}.") and len(key) > len(name) + 1:
            return name, key[len(name) + 1 :]
    return None


def flattened(terms: Iterable[Term], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with a member's table, ``[option.mace]`` of a run file, written as ``mace.KEY``."""
    names = [term.name for term in terms]
    flat: dict[str, Any] = {}
    for key, value in options.items():
        inner = (
            {f"{key}.{k}": v for k, v in value.items()}
            if key in names and isinstance(value, Mapping)
            else None
        )
        for name, item in ({key: value} if inner is None else inner).items():
            if name in flat:
                raise InputError(f"option {name!r} is given twice")
            flat[name] = item
    return flat


def shared_out(
    terms: tuple[Term, ...], options: Mapping[str, Any], loaders: Mapping[str, Callable[..., object]]
) -> dict[str, dict[str, Any]]:
    """Return each member's own options.

    ``member.option`` is for that member; an option alone is for the only member that names it, or, where none does,
    for the only one that takes any.

    Raises
    ------
    InputError
        When no member takes an option, or more than one.
    """
    if len(terms) == 1:
        return {terms[0].name: dict(options)}
    names = [term.name for term in terms]
    dealt: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in flattened(terms, options).items():
        member, option = qualified(key, names) or (_taker(key, value, names, loaders), key)
        if option in dealt[member]:
            raise InputError(f"option '{option}' of member '{member}' is given twice, as {key!r} too")
        dealt[member][option] = value
    return dealt


def _taker(key: str, value: Any, names: list[str], loaders: Mapping[str, Callable[..., object]]) -> str:
    """Return the only member that takes an option."""
    _refuse_given(key)
    known = {name: options_of(loaders[name]) for name in names}
    if "." in key or isinstance(value, Mapping):
        _refuse_near_member(key, known)
    takers = _takers(key, known)
    if len(takers) == 1:
        return takers[0]
    if takers:
        ways = " or ".join(f"{name}.{key}" for name in takers)
        raise InputError(f"option '{key}' could be for {_listed(takers)}: write {ways}")
    all_known = [f"{name}.{option}" for name, found in known.items() if found for option in found[0]]
    raise InputError(
        f"no member of {'+'.join(names)} has an option '{key}'{suggestion(key, all_known)}; their options: "
        f"{', '.join(all_known) or 'none'}"
    )


def _refuse_near_member(key: str, known: Mapping[str, tuple[dict[str, bool], bool] | None]) -> None:
    """Refuse a slip in a member's name, which a member that takes any option would else be given."""
    head = key.partition(".")[0]
    meant = suggestion(head, known)
    if meant and not any(found is not None and head in found[0] for found in known.values()):
        raise InputError(
            f"option '{key}': there is no member '{head}'{meant}; the members: {', '.join(known)}"
        )


def _takers(key: str, known: Mapping[str, tuple[dict[str, bool], bool] | None]) -> list[str]:
    """Return the members that name an option, or else those that take what they don't name.

    A loader that names nothing may well mean this option.
    """
    named = [name for name, found in known.items() if found is None or key in found[0] or found == ({}, True)]
    return named or [name for name, found in known.items() if found is not None and found[1]]


def _listed(names: list[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}"
