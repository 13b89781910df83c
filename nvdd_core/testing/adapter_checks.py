"""Checks of adapters: foreign code is what it was before, whatever happens in between.

Each is a function of one adapter that raises `ConformanceError`. Invariant: what is compared are the attributes
of loaded modules and classes themselves, by identity, not what an adapter or a registry says of them.
Layer: testing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import torch

from nvdd_core.adapters import AdapterRegistry
from nvdd_core.errors import AdapterConflictError
from nvdd_core.spec import DistributionSpec
from nvdd_core.testing.failures import ConformanceError, NotApplicable, check

# Kinds whose install shows in an attribute of a module or a class.
_VISIBLE: Final = ("method", "function", "python")
_ABSENT: Final = object()
# What Python itself keeps in modules.
_CACHES: Final = ("__warningregistry__",)
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")

Snapshot = dict[str, dict[str, object]]


def attributes(adapter: Any, root: torch.nn.Module | None = None) -> Snapshot:
    """Return every attribute that an adapter could have changed.

    Those of the target's own package and of its classes, the functions and classes that any other module but nvdd's
    own holds, and what `root` and its submodules have.
    Values are held, so identity can be compared later.
    """
    top = re.split(r"[.:]", _target(adapter), maxsplit=1)[0]
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "nvdd_core" != top:  # its own tables change as it works
            continue
        names = dict(getattr(module, "__dict__", {}))  # there may be None or an odd object in sys.modules
        own = name.partition(".")[0] == top
        # elsewhere only code counts: counters and caches of other packages change at any time
        found[name] = names if own else {n: v for n, v in names.items() if callable(v)}
        if own:
            for value in names.values():
                if isinstance(value, type):
                    found[f"{value.__module__}.{value.__qualname__}"] = dict(vars(value))
    for name, part in [] if root is None else root.named_modules():
        hooks = {f"{key}[{k}]": hook for key in _HOOKS for k, hook in getattr(part, key).items()}
        found[f"<root>.{name}"] = {**vars(part), **hooks}
    return found


def _target(adapter: Any) -> str:
    return str(adapter.describe().target)


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Name attributes that are other objects now, are gone, or were not there."""
    found = []
    for place, old in before.items():
        new = after.get(place, {})
        changed = [name for name, value in old.items() if new.get(name, _ABSENT) is not value]
        # a submodule that was imported meanwhile shows in its parent, and is no trace of an adapter
        added = [n for n, v in new.items() if n not in old and not isinstance(v, ModuleType)]
        found += [f"{place}.{name}" for name in (*changed, *added) if name not in _CACHES]
    return found


def _prepare(adapter: Any, root: torch.nn.Module | None) -> Snapshot:
    """Import what an adapter needs before anything is compared, then look at everything."""
    resolve = getattr(adapter, "resolve", None)
    if callable(resolve):
        resolve(root)
    return attributes(adapter, root)


def _check_back(adapter: Any, before: Snapshot, root: torch.nn.Module | None, after_what: str) -> None:
    left = _differences(before, attributes(adapter, root))
    if left:
        raise ConformanceError(
            f"adapter {adapter.kind} of {_target(adapter)}: {after_what} these are not the objects that they were "
            f"before: {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}; restore must put the originals back"
        )


@check
def assert_restores(adapter: Any, root: torch.nn.Module | None = None) -> None:
    """Check that install changes something, and that restore puts back every attribute, the same object.

    Parameters
    ----------
    adapter : adapter
    root : Module, optional
        The live model, for adapters of its submodules.
    """
    before = _prepare(adapter, root)
    if adapter.kind != "module":
        memento = adapter.install()
        try:
            seen = _differences(before, attributes(adapter, root))
        finally:
            adapter.restore(memento)
        if adapter.kind in _VISIBLE and not seen:
            raise ConformanceError(f"install of adapter {adapter.kind} of {_target(adapter)} changed nothing")
        _check_back(adapter, before, root, "after restore")
    with AdapterRegistry([adapter], root=root):
        pass
    _check_back(adapter, before, root, "after a registry restored it")


class _Deliberate(Exception):  # noqa: N818 - no error
    """Raised by the check itself."""


@check
def assert_restores_after_exception(adapter: Any, root: torch.nn.Module | None = None) -> None:
    """Check that originals are back when the code between install and restore raises."""
    before = _prepare(adapter, root)
    try:
        with AdapterRegistry([adapter], root=root):
            raise _Deliberate
    except _Deliberate:
        pass
    _check_back(adapter, before, root, "after an exception")


@check
def assert_nested_use_restores(adapter: Any, root: torch.nn.Module | None = None) -> None:
    """Check that a registry entered twice restores at the last exit, and not before."""
    before = _prepare(adapter, root)
    registry = AdapterRegistry([adapter], root=root)
    with registry:
        during = attributes(adapter, root)
        with registry:
            pass
        if lost := _differences(during, attributes(adapter, root)):
            raise ConformanceError(
                f"adapter {adapter.kind} of {_target(adapter)}: the inner exit undid {', '.join(lost[:5])} while the "
                "outer use goes on"
            )
    _check_back(adapter, before, root, "after nested use")


@check
def assert_second_owner_refused(adapter: Any, root: torch.nn.Module | None = None) -> None:
    """Check that a second owner of the target gets an AdapterConflictError that names both."""
    before = _prepare(adapter, root)
    first = AdapterRegistry([adapter], owner="conformance_first", root=root)
    second = AdapterRegistry([adapter], owner="conformance_second", root=root)
    with first:
        try:
            with second:
                refused = ""
        except AdapterConflictError as error:
            refused = str(error)
    if not ("conformance_first" in refused and "conformance_second" in refused):
        raise ConformanceError(
            f"adapter {adapter.kind} of {_target(adapter)}: a second owner should get an AdapterConflictError that "
            f"names both, found {refused or 'no error'!r}"
        )
    _check_back(adapter, before, root, "after a second owner was refused")


@check
def assert_adapter_round_trip(adapter: Any) -> None:
    """Check that an adapter can be hashed, compared, and carried by a spec as JSON."""
    spec = DistributionSpec(custom_ops=(adapter,))
    found = DistributionSpec.from_dict(spec.to_dict()).custom_ops[0]
    if found != adapter or hash(found) != hash(adapter) or type(found) is not type(adapter):
        raise ConformanceError(f"as JSON and back, adapter {adapter!r} becomes {found!r}")


@check
def assert_op_is_well_formed(adapter: Any, samples: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Run `torch.library.opcheck` on the operator of an op adapter.

    Parameters
    ----------
    adapter : OpAdapter
    samples : mapping of str to sequence of tuple
        Arguments to call the operator with, by ``"namespace::name"``.
    """
    if adapter.kind != "op":
        raise NotApplicable(f"a {adapter.kind} adapter has no operator")
    name = _target(adapter)
    given = samples.get(name) or samples.get(name.partition(".")[0])
    if not given:
        raise NotApplicable(f"no arguments for {name}: give op_samples = {{{name!r}: [(...)]}}")
    operator = _operator(name)
    for arguments in given:
        torch.library.opcheck(operator, arguments)


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    parts = rest.split(".")
    packet = getattr(getattr(torch.ops, namespace, None), parts[0], None)
    if packet is None:
        raise NotApplicable(f"no operator {name} is registered here")
    return getattr(packet, parts[1] if len(parts) > 1 else "default")
