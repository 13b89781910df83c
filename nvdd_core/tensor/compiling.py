"""ShardTensors under torch.compile: a function that handles one runs as it is written, never as a stale graph.

What an operation does depends on metadata that torch's guards don't see, and handlers communicate. So the dispatch
gives tracing up for the whole function in which it meets a ShardTensor; functions that this one calls on plain
tensors are compiled as usual. With ``fullgraph=True`` torch reports it as an error.

Layer: tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class NotTraceable(BaseException):
    """Raised under torch.compile's tracing only, where it ends the trace; no run ever sees it.

    Not an `Exception`, so that a handler in the traced code does not catch it and become part of a graph.
    """


def skip_compilation(func: Callable[..., Any]) -> None:
    """Keep torch.compile off `func`'s body and everything it calls."""
    with contextlib.suppress(
        ImportError, AttributeError
    ):  # without it pieces get compiled one by one: slow, not wrong
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        skip = _FrameAction.SKIP
        set_code_exec_strategy(func.__code__, _FrameExecStrategy(skip, skip))
