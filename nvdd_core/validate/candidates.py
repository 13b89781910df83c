"""Which changes to a spec could mend a difference, likeliest first.

Layer: validate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import MLIPSpec, neighbor_refresh_adapters
from nvdd_core.spec import DistributionSpec, HaloStorage, OutputSpec, ScatterMode, StrategyKind
from nvdd_core.spec.base import SpecData
from nvdd_core.validate.diagnose import Diagnosis
from nvdd_core.validate.findings import Cause, Fix, Place

_LOCAL, _REFRESH, _CORRECT = ScatterMode.LOCAL, ScatterMode.REFRESH, ScatterMode.HALO_CORRECTION
# A mode that sends less comes first where both could be right.
_OTHER_MODES = {
    _LOCAL: (_REFRESH, _CORRECT),
    _REFRESH: (_CORRECT, _LOCAL),
    _CORRECT: (_REFRESH, _LOCAL),
}
_BY_SCATTER = frozenset(
    {
        Cause.STALE_GHOSTS,
        Cause.WRONG_SCATTER,
        Cause.GHOSTS_COUNTED,
        Cause.RAISED,
        Cause.UNKNOWN,
        Cause.SCRIPTED,
    }
)
_BY_REDUCTION = frozenset({Cause.PARTIAL_SUM, Cause.GHOSTS_COUNTED, Cause.COUNTED_TWICE, Cause.UNKNOWN})


def candidates(
    spec: MLIPSpec,
    diagnosis: Diagnosis,
    modules: Mapping[str, torch.nn.Module],
    strategy: StrategyKind = StrategyKind.HALO,
) -> Iterator[MLIPSpec]:
    """Yield specs that could work where `spec` doesn't.

    Rules of outputs that contradict what the model returned are certain, so every candidate has them mended.

    Parameters
    ----------
    spec : MLIPSpec
    diagnosis : Diagnosis
    modules : mapping of str to Module
        Torch modules in the model by qualified name.
    strategy : StrategyKind
        Of the run; where nothing is exchanged, what would follow an exchange is left alone.
    """
    cause = diagnosis.cause
    base = with_outputs(spec, diagnosis.rules)
    if base != spec:
        yield base
    distribution = spec.distribution
    if cause in _BY_REDUCTION:
        flipped = distribution.replace(system_reductions=not distribution.system_reductions)
        yield base.replace(distribution=flipped)
        if base != spec:
            yield spec.replace(distribution=flipped)
    storage = distribution.storage
    exchanges = strategy is not StrategyKind.WIDE_HALO
    if exchanges and cause in _BY_SCATTER and isinstance(storage, HaloStorage):
        for mode in _OTHER_MODES[storage.scatter]:
            changed = distribution.replace(storage=storage.replace(scatter=mode))
            yield base.replace(distribution=changed)
            if cause is Cause.GHOSTS_COUNTED:
                yield base.replace(distribution=changed.replace(system_reductions=True))
    if exchanges and cause is Cause.STALE_GHOSTS:
        adapted = refreshed(base, diagnosis.place, modules)
        if adapted is not None:
            yield adapted


def with_outputs(spec: MLIPSpec, rules: Mapping[str, OutputSpec]) -> MLIPSpec:
    """Return `spec` with other rules for some outputs."""
    return spec.replace(outputs={**spec.outputs, **rules}) if rules else spec


def refreshed(spec: MLIPSpec, stale: Place | None, modules: Mapping[str, torch.nn.Module]) -> MLIPSpec | None:
    """Return `spec` with adapters that refresh what modules like the one that wrote stale rows return.

    Modules whose names differ in numbers alone are alike: the blocks of a list.
    """
    if stale is None or not stale.module:
        return None
    pattern = re.sub(r"\d+", r"\\d+", re.escape(stale.module))
    alike = [module for name, module in modules.items() if re.fullmatch(pattern, name)]
    storage = spec.distribution.storage
    always = isinstance(storage, HaloStorage) and storage.scatter is not _LOCAL
    try:
        helpers = neighbor_refresh_adapters(alike, always=always)
    except InputError:  # nothing there to adapt
        return None
    return spec | MLIPSpec(distribution=DistributionSpec(third_party_helpers=helpers))


def fixes_between(before: MLIPSpec, after: MLIPSpec) -> tuple[Fix, ...]:
    """Return what differs between two specs, field by field."""
    old, new = dict(_leaves(before, "")), dict(_leaves(after, ""))
    return tuple(
        Fix(name, old.get(name, "none"), new.get(name, "none"))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    )


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, SpecData):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple):
        yield path, ", ".join(map(str, value)) or "none"
    else:
        yield path, str(value)
