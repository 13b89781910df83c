"""Compares a model on several ranks with one process, and says what is wrong and how to mend it.

Layer: validate.
"""

from nvdd_core.validate.driver import trace_and_validate
from nvdd_core.validate.findings import (
    Cause,
    Difference,
    Divergence,
    Fix,
    HandlerCount,
    Helper,
    MissingEdges,
    OutputCheck,
    Place,
    RankError,
    Relation,
    Scripted,
    Traffic,
    ValidationReport,
    View,
)

__all__ = [
    "Cause",
    "Difference",
    "Divergence",
    "Fix",
    "HandlerCount",
    "Helper",
    "MissingEdges",
    "OutputCheck",
    "Place",
    "RankError",
    "Relation",
    "Scripted",
    "Traffic",
    "ValidationReport",
    "View",
    "trace_and_validate",
]
