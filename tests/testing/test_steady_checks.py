"""What would make a GPU wait in every step is found on a CPU, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvdd_core import testing as kit
from nvdd_core.spec import CompilePolicy
from nvdd_core.testing import ConformanceError, ModelSource, check_capturable, refuse_waiting
from tests.runtime.test_steady import Near
from tests.testing.toys import CUTOFF

X, PLACES = torch.linspace(0.0, 1.0, 5), torch.tensor([0, 3])
MASK = X > 0.4


@torch.library.custom_op("nvdd_test::reads_back", mutates_args=())
def reads_back(x: torch.Tensor) -> torch.Tensor:
    """Reads values inside an operator."""
    return x * len(x.tolist())


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "bool": lambda: bool(X.sum() > 3.0),
    "tolist": X.tolist,
    "numpy": X.numpy,
    "cpu": X.cpu,
    "nonzero": MASK.nonzero,
    "mask": lambda: X[MASK],
    "values under a mask": lambda: X.clone().index_put_((MASK,), X[:2]),
    "unique": PLACES.unique,
    "equal": lambda: torch.equal(X, X),
    "bincount": PLACES.bincount,
    "repeats": lambda: torch.repeat_interleave(X[:2], PLACES),
    "list": lambda: torch.tensor([1.0, 2.0]),
    "list as an index": lambda: X[[0, 1]],
    "solver": lambda: torch.linalg.inv(torch.eye(3)),
    "operator": lambda: reads_back(X),
}
FINE: dict[str, Callable[[], Any]] = {
    "where": lambda: torch.where(MASK, 1.0, X),
    "index": lambda: X[PLACES].sum(),
    "one value under a mask": lambda: X.clone().masked_fill_(MASK, 2.0).index_put_((MASK,), torch.zeros(())),
    "repeats of known number": lambda: torch.repeat_interleave(X[:2], PLACES, output_size=3),
    "one entry set": lambda: X.clone().__setitem__(0, 1.0),
    "solver that doesn't tell": lambda: torch.linalg.inv_ex(torch.eye(3)).inverse,
}


@pytest.mark.parametrize("what", WAITS)
def test_found(what: str) -> None:
    with pytest.raises(ConformanceError, match="wait"), refuse_waiting():
        WAITS[what]()


@pytest.mark.parametrize("what", FINE)
def test_not_refused(what: str) -> None:
    with refuse_waiting():
        FINE[what]()


def test_in_a_backward_pass() -> None:
    x = X.clone().requires_grad_()
    y = x * x

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * float(g.sum())

    with refuse_waiting():
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        read = Reads.apply(y).sum()
        with pytest.raises(ConformanceError, match="_local_scalar_dense"):
            torch.autograd.grad(read, x)


@pytest.mark.parametrize("direct", ["", "_direct"])
def test_models(direct: str) -> None:
    atoms = kit.default_structures(CUTOFF, ("Ar", "Kr"))["crystal"]
    model = ModelSource(f"tests.testing.toys:load{direct}", {"bug": ""}).load()
    check_capturable(model, atoms)
    forward = model.forward

    def waits(batch: Any) -> Any:
        assert float(batch.positions.detach().abs().max()) > 0.0
        return forward(batch)

    model.forward = waits
    with pytest.raises(ConformanceError, match="#check-capturable"):
        check_capturable(model, atoms)


def test_near_edges_are_chosen_without_waiting() -> None:
    """Where a model takes padded rows: their number stays."""
    crystal = kit.default_structures(CUTOFF, "Ar")["crystal"]
    check_capturable(Near(pads=True), crystal)
    with pytest.raises(ConformanceError, match="nonzero"):
        check_capturable(Near(pads=False), crystal)


def test_whatever_the_spec_says() -> None:
    """An author checks before declaring."""
    model = Near(pads=True)
    declared = model.distribution_spec
    model.distribution_spec = lambda kind: declared(kind).replace(compile_policy=CompilePolicy(pads=True))  # type: ignore[method-assign]
    check_capturable(model, kit.default_structures(CUTOFF, "Ar")["crystal"])
