"""Counts collectives and the bytes that this rank sends.

`CommCounter` is a plain tally per kind of collective; tests hold communication budgets against it and
``summary.json`` reports it. It costs two dictionary updates a collective.

Layer: comm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CommTally:
    """Calls and sent bytes by kind of collective, frozen at one moment."""

    calls: Mapping[str, int]
    bytes: Mapping[str, int]

    @property
    def total_calls(self) -> int:
        """Number of collectives of every kind."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """Bytes sent by this rank in collectives of every kind."""
        return sum(self.bytes.values())


@dataclass
class CommCounter:
    """Running tally of one rank's collectives."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, n_bytes: int) -> None:
        """Count one collective of `kind` in which this rank sends `n_bytes`."""
        self.calls[kind] += 1
        self.bytes[kind] += n_bytes

    def add_tally(self, tally: CommTally) -> None:
        """Count what `tally` holds once more."""
        self.calls.update(tally.calls)
        self.bytes.update(tally.bytes)

    def restore(self, before: CommTally) -> None:
        """Forget what was added after the snapshot `before`."""
        self.calls, self.bytes = Counter(before.calls), Counter(before.bytes)

    def snapshot(self) -> CommTally:
        """Return the tally so far."""
        return CommTally(dict(self.calls), dict(self.bytes))

    def since(self, before: CommTally) -> CommTally:
        """Return what was added after the snapshot `before`."""
        return CommTally(
            {k: v - before.calls.get(k, 0) for k, v in self.calls.items() if v != before.calls.get(k, 0)},
            {k: v - before.bytes.get(k, 0) for k, v in self.bytes.items() if v != before.bytes.get(k, 0)},
        )
