"""`ModuleHookAdapter`: runs code before or after chosen submodules of one live model, by torch's public hooks.

It changes one model, not a class, so two models in a process can be treated differently.

Layer: adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils.hooks import RemovableHandle

from nvdd_core.adapters.attributes import checked_code, site_of
from nvdd_core.adapters.base import Adapter, Name, Patch
from nvdd_core.errors import AdapterError, SpecError
from nvdd_core.plugins.rows import AdapterKind

_TOKENS = re.compile(r"\*\*|\*|\?|\[[^\]]+\]|.")
_WILD = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


@dataclass(frozen=True)
class ModuleHookAdapter(Adapter):
    """Hooks the submodules of a live model whose names match; installed by a registry that has the model as root.

    Attributes
    ----------
    pattern : str
        ``"qualified.name"``, ``":ClassName"`` (a base class will do) or both, ``"qualified.name:ClassName"``. ``*``
        stands for anything but a dot, ``**`` for anything, ``?`` and ``[0-9]`` for one character.
    before : callable or str, optional
        Torch's forward pre-hook: ``before(module, args, kwargs) -> None or (args, kwargs)``.
    after : callable or str, optional
        Torch's forward hook: ``after(module, args, kwargs, output) -> None or the new output``.
    install_site : str
        Where this was written.

    Raises
    ------
    SpecError
        When an argument is malformed or there is no hook.
    """

    kind: ClassVar[str] = AdapterKind.MODULE.value
    stacks: ClassVar[bool] = True

    pattern: str
    before: Callable[..., Any] | str | None = None
    after: Callable[..., Any] | str | None = None
    install_site: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern.strip(":") or self.pattern.count(":") > 1:
            raise SpecError(
                "ModuleHookAdapter.pattern: expected 'qualified.name', ':ClassName' or 'qualified.name:ClassName', "
                f"found {self.pattern!r}"
            )
        if self.before is None and self.after is None:
            raise SpecError(f"ModuleHookAdapter({self.pattern}): give before or after")
        for name in ("before", "after"):
            if getattr(self, name) is not None:
                code = checked_code(getattr(self, name), f"ModuleHookAdapter.{name}")
                object.__setattr__(self, name, code)
        object.__setattr__(self, "install_site", site_of(self.install_site, self.before, self.after))

    @property
    def target(self) -> str:
        """The pattern."""
        return self.pattern

    @property
    def full_target(self) -> str:
        """The target in full, as text."""
        return self.pattern

    def resolve(self, root: torch.nn.Module | None = None) -> Patch:
        """Find the live target; see `Adapter.resolve`."""
        if not isinstance(root, torch.nn.Module):
            raise AdapterError(
                f"{self}: hooks need the live model, found {root!r}; install by AdapterRegistry([...], root=model)"
            )
        return HookPatch(root, self.pattern, str(self), self._code("before"), self._code("after"))

    def _code(self, name: str) -> Any:
        code = getattr(self, name)
        return None if code is None else Name.of(code, name).resolve(str(self))


class HookPatch(Patch):
    """The hooks on the submodules of `root` that match `pattern`.

    Raises
    ------
    AdapterError
        When nothing matches.
    """

    def __init__(self, root: torch.nn.Module, pattern: str, what: str, before: Any, after: Any) -> None:
        self._root, self._pattern, self._what = root, pattern, what
        self._before, self._after = before, after
        self._modules: list[tuple[torch.nn.Module | None, str, torch.nn.Module]] = []
        self._handles: list[RemovableHandle] = []

    def keys(self) -> tuple[Hashable, ...]:
        """Return what stands for the target; see `Patch.keys`."""
        self._look_up()
        return tuple(dict.fromkeys(("module", id(module)) for _, _, module in self._modules))

    def apply(self) -> None:
        """Make the change; see `Patch.apply`."""
        self._look_up()
        for module in {id(m): m for _, _, m in self._modules}.values():
            if self._before is not None:
                self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            if self._after is not None:
                self._handles.append(module.register_forward_hook(self._after, with_kwargs=True))

    def undo(self) -> None:
        """Take the change back; see `Patch.undo`."""
        while self._handles:
            self._handles.pop().remove()

    def _look_up(self) -> None:
        """Find the modules, unless those found before are still in their places."""
        if self._modules and all(
            parent is None or parent._modules.get(name) is module for parent, name, module in self._modules
        ):
            return
        name_pattern, _, class_pattern = self._pattern.partition(":")
        named, classed = _compiled(name_pattern or "**"), _compiled(class_pattern or "**")
        names = dict(self._root.named_modules(remove_duplicate=False))
        self._modules = []
        for name, module in names.items():
            if named.fullmatch(name) and any(classed.fullmatch(c.__name__) for c in type(module).__mro__):
                parent, _, short = name.rpartition(".")
                self._modules.append((names[parent] if name else None, short, module))
        if not self._modules:
            shown = ", ".join(list(names)[1:9]) or "none"
            raise AdapterError(
                f"{self._what}: no submodule of {type(self._root).__name__} matches {self._pattern!r}; its submodules: "
                f"{shown}{', ...' if len(names) > 9 else ''}"
            )


def _compiled(pattern: str) -> re.Pattern[str]:
    def one(token: str) -> str:
        return _WILD.get(token) or (token if len(token) > 1 else re.escape(token))

    return re.compile("".join(map(one, _TOKENS.findall(pattern))))
