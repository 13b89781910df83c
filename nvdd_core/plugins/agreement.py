"""Whether all ranks see the same plugins.

Key objects: `fingerprint`, `digest`, `check_agreement`. The caller gathers (this layer has no
collectives). Invariant: fingerprints hold no paths, since nodes may differ in them, and depend on
nothing but what is installed and the switches. Layer: plugins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from nvdd_core.errors import PluginMismatchError
from nvdd_core.plugins.hookspecs import API
from nvdd_core.plugins.record import PluginRecord


def fingerprint(
    examined: Iterable[PluginRecord], used: Iterable[PluginRecord], core_version: str
) -> tuple[str, ...]:
    """Describe plugins in lines that are equal wherever the plugins are.

    Parameters
    ----------
    examined
        All records, as the metadata alone has them.
    used
        Loaded records whose declared rows count as well.
    core_version
        Version of the running core.
    """
    lines = [f"nvdd-core {core_version} api {API}"]
    for record in examined:
        entry = record.entry
        lines.append(f"{entry.name} {entry.distribution} {entry.version} {entry.value} {record.status.value}")
    for record in used:
        rows = [repr(row) for row in record.rows]
        lines.append(f"{record.name} declares {_hashed(json.dumps([record.status.value, *rows]))}")
    return tuple(lines)


def digest(lines: Iterable[str]) -> str:
    """Return 16 hexadecimal digits for a fingerprint."""
    return _hashed("\n".join(lines))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def check_agreement(fingerprints: Iterable[tuple[str, ...]]) -> None:
    """Compare the fingerprints of all ranks, gathered by the caller, in rank order.

    Raises
    ------
    PluginMismatchError
        On every rank alike, naming the first rank that differs from rank 0 and in what.
    """
    gathered = list(fingerprints)
    for rank, lines in enumerate(gathered):
        if lines == gathered[0]:
            continue
        here = [line for line in lines if line not in gathered[0]]
        there = [line for line in gathered[0] if line not in lines]
        raise PluginMismatchError(
            f"the ranks see different plugins: rank 0 has [{'; '.join(there) or 'nothing more'}], "
            f"rank {rank} has [{'; '.join(here) or 'nothing more'}]; install the same versions on every "
            f"node and give every rank the same NVDD_PLUGINS and NVDD_DISABLE_PLUGINS"
        )
