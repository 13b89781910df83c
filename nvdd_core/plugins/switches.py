"""Which plugins the user lets in: environment variables or the same given as arguments.

Key object: `Switches`. The environment is what worker processes inherit, so it is the one
place where the choice is kept. Invariant: a plugin that is switched off is never imported.
Layer: plugins.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from nvdd_core.errors import InputError
from nvdd_core.plugins.record import PluginEntry
from nvdd_core.plugins.requirements import normalized

ALLOW: Final = "NVDD_PLUGINS"
DENY: Final = "NVDD_DISABLE_PLUGINS"
STRICT: Final = "NVDD_STRICT_PLUGINS"
_BY_DISTRIBUTION: Final = "dist:"


def _items(text: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


def _matches(item: str, entry: PluginEntry) -> bool:
    if item.startswith(_BY_DISTRIBUTION):
        return normalized(item.removeprefix(_BY_DISTRIBUTION)) == normalized(entry.distribution)
    # A hyphen can't occur in a plugin's name, so such an item names a distribution.
    return item == entry.name or ("-" in item and normalized(item) == normalized(entry.distribution))


@dataclass(frozen=True)
class Switches:
    """The user's choice of plugins.

    Parameters
    ----------
    allow
        Only these plugins; an empty tuple lets none in, None lets all in.
    deny
        Not these plugins; wins over `allow`.
    strict
        Whether the first broken, incompatible or conflicting plugin is an error.

    Notes
    -----
    An item is a plugin's name, or ``dist:NAME`` for everything of one distribution.
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] | None = None,
        strict: bool | None = None,
    ) -> Switches:
        """Combine the environment with explicit arguments.

        Parameters
        ----------
        environ
            Where ``NVDD_PLUGINS``, ``NVDD_DISABLE_PLUGINS`` and ``NVDD_STRICT_PLUGINS`` are read;
            default the process environment.
        allow, strict
            Take the place of the variable when given.
        deny
            Added to the variable, so what a user switched off stays off.

        Raises
        ------
        InputError
            When ``NVDD_STRICT_PLUGINS`` is neither 0 nor 1.
        """
        env = os.environ if environ is None else environ
        from_env = _items(env[ALLOW]) if ALLOW in env else None
        return cls(
            allow=from_env if allow is None else tuple(allow),
            deny=(*_items(env.get(DENY, "")), *(deny or ())),
            strict=_flag(env.get(STRICT, "")) if strict is None else strict,
        )

    def refusal(self, entry: PluginEntry) -> str | None:
        """Return why `entry` is switched off, or None when it is let in."""
        for item in self.deny:
            if _matches(item, entry):
                return f"switched off by '{item}' in {DENY}"
        if self.allow is None or any(_matches(item, entry) for item in self.allow):
            return None
        chosen = ",".join(self.allow)
        return f"not among the plugins let in ({ALLOW}='{chosen}')"

    def unknown(self, entries: Iterable[PluginEntry]) -> tuple[str, ...]:
        """Return the items that match no installed plugin: most often a slip of the pen."""
        known = tuple(entries)
        listed = (*(self.allow or ()), *self.deny)
        return tuple(item for item in listed if not any(_matches(item, entry) for entry in known))


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise InputError(f"{STRICT} must be 0 or 1, found {text!r}")
