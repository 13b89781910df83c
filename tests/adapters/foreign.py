"""Stands for somebody else's package: what adapters change in the tests."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

import torch

LIMIT = 3


def scale(x: Any, by: Any = 2) -> Any:
    return x * by


class Base:
    def forward(self, x: Any) -> Any:
        return x + 1

    def inherited(self, x: Any) -> Any:
        return x + 100


class Block(Base):
    rate = 0.5

    def forward(self, x: Any, *, extra: Any = 0) -> Any:
        return super().forward(x) * 2 + extra

    @staticmethod
    def fixed(x: Any) -> Any:
        return x * 3

    @classmethod
    def named(cls, x: Any) -> Any:
        return cls.__name__, x

    @property
    def size(self) -> int:
        return 7

    @cached_property
    def once(self) -> int:
        return 8


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(2, 2, bias=False)
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use

    def _python_sum(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, index, source)

    @torch.jit.script
    def scripted(x: torch.Tensor, by: float) -> torch.Tensor:
        return torch.tanh(x) * by

    scripted_sum = torch.jit.script(_python_sum)

    class Scripted(torch.jit.ScriptModule):
        act = torch.jit.script(_python_sum)

        @torch.jit.script_method
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) + 1
