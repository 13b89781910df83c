"""Whether and how the forward pass is compiled or captured: `CompilePolicy`.

Layer: spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nvdd_core.errors import SpecError
from nvdd_core.spec.base import Decode, SpecData, decode_value


@dataclass(frozen=True)
class CompilePolicy(SpecData):
    """How a model's forward pass is compiled where a run asks for it.

    Attributes
    ----------
    supported : bool
        Whether the model can be compiled at all.
    backend : str
        Name of the compiler backend.
    fullgraph : bool
        Whether a graph break is an error.
    growth : float
        Padded sizes grow by this factor when rows or edges no longer fit, so that shapes seldom change; above 1.
    capture : bool
        Whether an evaluation can be captured in a CUDA graph and replayed: on a GPU it never waits for the device nor
        copies from the host, all it does follows from the positions on the device and from what stays between two
        rebuilds, and what it keeps from one evaluation to the next stays where it is until a rebuild.
    pads : bool
        Whether it may be handed owned rows that stand for none, with edges between these only, and ghosts that nobody
        needs: it gives ``node_energy`` and reads its edges by ``LocalBatch.near_edges`` only. What was captured then
        serves after a rebuild, too. A model that calls ``near_edges`` can't be captured otherwise.
    """

    READERS: ClassVar[Mapping[str, Decode]] = {
        "supported": decode_value(bool),
        "backend": decode_value(str),
        "fullgraph": decode_value(bool),
        "growth": decode_value(int, float),
        "capture": decode_value(bool),
        "pads": decode_value(bool),
    }

    supported: bool = False
    backend: str = "inductor"
    fullgraph: bool = True
    growth: float = 1.25
    capture: bool = False
    pads: bool = False

    def __post_init__(self) -> None:
        self._require("supported", bool)
        self._require("backend", str)
        self._require("fullgraph", bool)
        self._require("growth", (int, float))
        self._require("capture", bool)
        self._require("pads", bool)
        if not 1.0 < self.growth < float("inf"):
            raise SpecError(f"CompilePolicy.growth: expected a finite factor above 1, found {self.growth!r}")
