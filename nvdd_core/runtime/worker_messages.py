"""What a pool and its workers say to each other: plain data that is pickled.

Layer: runtime.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from typing import Any

from nvdd_core.comm import Fault
from nvdd_core.errors import RankLostError


@dataclass(frozen=True)
class Setup:
    """What a process needs to be one rank."""

    rank: int
    size: int
    device: str
    rendezvous: str
    sys_path: tuple[str, ...]
    parent: int


@dataclass(frozen=True)
class Call:
    """One call: the pickled (function, args), and how to import the parent's main module if they need it."""

    payload: bytes
    main: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """The pickled result."""

    payload: bytes = b""


@dataclass(frozen=True)
class Failed:
    """What a rank raised."""

    fault: Fault
    traceback: str = ""
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, rank: int, exc: BaseException) -> Failed:
        """Describe what rank `rank` raised."""
        return cls(Fault.of(rank, exc), "".join(traceback.format_exception(exc)))

    @classmethod
    def lost(cls, rank: int, how: str) -> Failed:
        """Describe the end of a rank that could say nothing."""
        return cls(Fault.of(rank, RankLostError(f"rank {rank}: the worker process {how}")), time=0.0)
