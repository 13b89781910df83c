"""What a validation found: data only, no diagnosis and no text.

`ValidationReport` holds everything; the classes below are its parts. Rows are named by global id, places in code by
file and line.

Invariant: `to_dict` is JSON-ready and holds every field.
Layer: validate.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nvdd_core.adapters import AdapterStatus
from nvdd_core.errors import SpecError
from nvdd_core.runtime import MLIPSpec

VERSION = 1


class Cause(StrEnum):
    """Why a model on several ranks differs from the same model in one process."""

    STALE_GHOSTS = "stale_ghosts"
    """Ghost rows are read whose owners have newer values."""
    WRONG_SCATTER = "wrong_scatter"
    """What a scatter into rows is followed by doesn't fit: contributions are lost or counted twice."""
    PARTIAL_SUM = "partial_sum"
    """A value made of this rank's rows alone is used as if it were the whole system's."""
    GHOSTS_COUNTED = "ghosts_counted"
    """A sum over rows includes ghosts, so that rows near a boundary count on several ranks."""
    COUNTED_TWICE = "counted_twice"
    """A value that is complete on every rank is summed over ranks once more."""
    OUTPUT_PARTIAL = "output_partial"
    """An output is this rank's share, and its OutputSpec doesn't say that shares are to be summed."""
    SCRIPTED = "scripted"
    """Scripted code was handed a ShardTensor, whose operations nobody sees from then on."""
    MISSING_GHOSTS = "missing_ghosts"
    """A rank lacks rows that its own rows depend on."""
    GRADIENT = "gradient"
    """Values agree and derivatives don't."""
    REFERENCE = "reference"
    """The model fails in one process."""
    RAISED = "raised"
    """The model raises on ranks only."""
    UNKNOWN = "unknown"
    """None of these could be told."""


class Relation(StrEnum):
    """How a value on ranks relates to the value in one process."""

    EQUAL = "equal"
    """Equal, each row on its owner or the whole on every rank."""
    STALE = "stale"
    """Owned rows are equal, ghost rows are not."""
    ADDS_UP = "adds_up"
    """The ranks' values differ and add up."""
    MULTIPLIED = "multiplied"
    """Every rank's value is as many times too large as there are ranks."""
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """The shapes allow no comparison."""


class View(StrEnum):
    """What dim 0 of a tensor counts."""

    LOCAL = "local"
    OWNED = "owned"
    EDGES = "edges"
    WHOLE = "whole"
    """Nothing that is spread over ranks."""


@dataclass(frozen=True)
class Place:
    """A line of the model's code.

    Attributes
    ----------
    file : str
    line : int
    function : str
        Qualified name.
    module : str
        Qualified name of the innermost torch module whose forward is under way, "" for none.
    """

    file: str
    line: int
    function: str
    module: str = ""

    def __str__(self) -> str:
        """Return ``file:line``."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Difference:
    """How far a tensor on ranks is from the one in one process.

    Attributes
    ----------
    max_abs, max_rel : float
        Largest difference, and the same over the largest value of the reference.
    tolerance : float
        What `max_abs` may be.
    worst : tuple of int
        Global ids of the rows (or numbers of the systems) that differ most, if any differ too much.
    """

    max_abs: float
    max_rel: float
    tolerance: float
    worst: tuple[int, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it is within tolerance; NaN is not."""
        return self.max_abs <= self.tolerance


@dataclass(frozen=True)
class OutputCheck:
    """The verdict on one output.

    Attributes
    ----------
    name : str
    per_row : bool
        Whether it has an entry a row; otherwise one a system.
    value : Difference
    gradient : Difference or None
        Of a fixed projection of the output, with respect to positions; None where it isn't differentiable.
    raw : Relation
        How what the model's forward returned under this name relates to the reference.
    """

    name: str
    per_row: bool
    value: Difference
    gradient: Difference | None = None
    raw: Relation = Relation.UNKNOWN

    @property
    def passed(self) -> bool:
        """Whether value and gradient are within tolerance."""
        return self.value.passed and (self.gradient is None or self.gradient.passed)


@dataclass(frozen=True)
class Divergence:
    """The first operation of a forward pass whose result differs.

    Attributes
    ----------
    place : Place
    op : str
    occurrence : int
        How often this operation ran at this line before.
    view : View
    relation : Relation
    difference : Difference
    stale : Place or None
        Where the rows that it reads, and whose ghosts are stale, were written.
    """

    place: Place
    op: str
    occurrence: int
    view: View
    relation: Relation
    difference: Difference
    stale: Place | None = None


@dataclass(frozen=True)
class HandlerCount:
    """Calls of one operation on ShardTensors, and the bytes that it sent, over all ranks."""

    op: str
    handler: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one evaluation, over all ranks."""

    kind: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class MissingEdges:
    """Edges of the reference into owned rows of `rank` that it lacks.

    Attributes
    ----------
    rank, count : int
    pairs : tuple of (int, int)
        Sender and receiver of the first few, by global id.
    """

    rank: int
    count: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Helper:
    """A function of the model's code whose result is a share on each rank, and that no adapter declares."""

    place: Place
    relation: Relation
    calls: int


@dataclass(frozen=True)
class Scripted:
    """Scripted code that was handed a ShardTensor.

    Attributes
    ----------
    name : str
    place : Place
        Where it was called.
    calls : int
        On one rank.
    scatters : tuple of str
        Scatters in its graph that no handler saw.
    """

    name: str
    place: Place
    calls: int
    scatters: tuple[str, ...]


@dataclass(frozen=True)
class RankError:
    """What the model raised; `trace` is the traceback where there is one."""

    type: str
    message: str
    trace: str = ""


@dataclass(frozen=True)
class Fix:
    """A change to the spec: the field by its path, what it was and what it is."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return the change as ``field: before -> after``."""
        return f"{self.field}: {self.before} -> {self.after}"


@dataclass(frozen=True)
class ValidationReport:
    """What a validation found.

    Attributes
    ----------
    model : str
    ranks : int
    strategy, dtype, device : str
    n_rows, n_edges : int
        Of the reference.
    passed : bool
        Whether the model with the spec as given agrees with one process. A fix that was found doesn't change that.
    cause : Cause or None
        None where it passed.
    place : Place or None
        The line to look at, where one is known.
    outputs : tuple of OutputCheck
        With the spec as given.
    divergence : Divergence or None
    missing, helpers, scripted, handlers, traffic, adapters
        See their classes.
    error : RankError or None
    fixes : tuple of Fix
        What turns the spec as given into one that works; empty where nothing had to be fixed, or nothing worked.
    spec : MLIPSpec or None
        A spec that works: the one as given, or that with the fixes; None where neither does.
    reach : float or None
        Angstrom; a cutoff, larger than the declared one, with which the ranks agree with one process.
    evaluations : int
        Runs on ranks that were made.
    warning : str
        Why a passed validation says little, "" where it doesn't.
    next_action : str
    """

    model: str
    ranks: int
    strategy: str
    dtype: str
    device: str
    n_rows: int
    n_edges: int
    passed: bool
    cause: Cause | None
    place: Place | None
    outputs: tuple[OutputCheck, ...]
    divergence: Divergence | None
    missing: tuple[MissingEdges, ...]
    helpers: tuple[Helper, ...]
    scripted: tuple[Scripted, ...]
    handlers: tuple[HandlerCount, ...]
    traffic: tuple[Traffic, ...]
    adapters: tuple[AdapterStatus, ...]
    error: RankError | None
    fixes: tuple[Fix, ...]
    spec: MLIPSpec | None
    reach: float | None
    evaluations: int
    warning: str
    next_action: str

    @property
    def fixed(self) -> bool:
        """Whether the spec as given fails and another one that works was found."""
        return bool(self.fixes)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return {"version": VERSION, **_plain(self)}

    def text(self) -> str:
        """Return the report for people."""
        from nvdd_core.validate.text import report_text  # text needs this module

        return report_text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, MLIPSpec):
        return _spec_data(value)
    if dataclasses.is_dataclass(value):
        found = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {**found, "passed": value.passed} if isinstance(value, OutputCheck | Difference) else found
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has neither NaN nor infinity
    return value


def _spec_data(spec: MLIPSpec) -> dict[str, Any]:
    try:
        return spec.to_dict()
    except SpecError as exc:  # it holds code without a name
        return {"error": str(exc)}
