"""mace's pair repulsion, in the model's precision whatever torch's default is.

``14.3996 * Z`` of a whole number Z has torch's default dtype. Where that is float32, mace's ZBL in a float64 model has
half its digits, and another value than in training, which sets the default.

Key object: `settle_repulsion`. Invariant: the formula is mace's own code; results depend on no setting of the process.
Layer: plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nvdd_mace.foreign import modules

_Zbl: Any = modules.ZBLBasis


class _Precisely(TorchFunctionMode):
    """Lets Python's numbers make a floating-point tensor of a dtype out of whole numbers, not of the default one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(type(value) is float for value in args):
            args = tuple(self._floating(value) for value in args)
        return func(*args, **(kwargs or {}))

    def _floating(self, value: Any) -> Any:
        whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
        return value.to(self._dtype) if whole else value


class Repulsion(_Zbl):
    """ZBL as mace has it."""

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        """Return the repulsion of each receiver; `x` are distances."""
        with _Precisely(x.dtype):
            found: torch.Tensor = super().forward(x, *rest)
        return found


def settle_repulsion(module: torch.nn.Module) -> None:
    """Let the pair repulsion of a model, where it has one, be computed in the model's own precision."""
    for part in module.modules():
        if type(part) is _Zbl:
            part.__class__ = Repulsion
