"""What a GPU can run without the host: evaluations between two rebuilds that read nothing back.

Key objects: `check_capturable`, `refuse_waiting`. On a GPU such an evaluation can be captured as a graph and run again
by one call; here the operations that would wait, or copy from the host, are looked for on a CPU. Invariant: what is
refused waits on a GPU whatever the values are. Layer: testing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import ase
import torch
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvdd_core.comm import Mesh
from nvdd_core.runtime import Batch, DistributedModel, DomainConfig, MLIPSpec, ShardedBatch
from nvdd_core.runtime.model_api import members_of
from nvdd_core.runtime.source import ModelSource
from nvdd_core.testing.evaluation import outputs_for
from nvdd_core.testing.failures import ConformanceError, check

_SIZE: Final = "the size of its result depends on values"
_WAITS: Final = {
    "_local_scalar_dense": "a number is read back (item, float, bool of a tensor)",
    "is_nonzero": "a number is read back",
    "equal": "its answer is read back",
    "nonzero": _SIZE,
    "masked_select": _SIZE,
    "_unique": _SIZE,
    "_unique2": _SIZE,
    "unique_dim": _SIZE,
    "unique_consecutive": _SIZE,
    "bincount": _SIZE,
    "_linalg_check_errors": "it asks whether a matrix could be solved for; the functions with _ex don't",
}
# Methods that end in no operation on a CPU.
_READS: Final = ("tolist", "numpy", "cpu", "__array__")
_MAKES: Final = ("tensor", "as_tensor", "from_numpy", "new_tensor")


def _refuse(name: str, why: str) -> None:
    raise ConformanceError(
        f"{name}: {why}, for which a GPU has to wait in every step; see where it was called from"
    )


class _Functions(TorchFunctionMode):
    """Sees methods that make no operation."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            _refuse(f"Tensor.{name}", "values are read back")
        if name in _MAKES:
            _refuse(f"torch.{name}", "values are copied from the host")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees operations, also those within operators that are written in Python."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "aten":
            if why := _WAITS.get(name) or _by_arguments(func, args, kwargs):
                _refuse(f"aten.{name}", why)
            return func(*args, **kwargs)
        written = OPDEFS.get(f"{func.namespace}::{name}")
        if written is None:
            return func(*args, **kwargs)
        with self, _Functions():
            return written._init_fn(*args, **kwargs)


def _by_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say why an operation waits with these arguments; nothing when it doesn't."""
    name = func.overloadpacket.__name__
    if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
        return f"{_SIZE}, where no output_size is given"
    masked = name in ("index", "index_put", "index_put_") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    # one number under a mask is written without asking how many there are
    if masked and (name == "index" or args[2].numel() != 1):
        return "a mask is an index, whose number of places has to be known"
    if name == "lift_fresh" and args[0].dim() > 0:
        return "values are copied from the host (a list made a tensor, or used as an index)"
    return ""


@contextmanager
def refuse_waiting() -> Iterator[None]:
    """Raise ConformanceError where the body has torch do what would make a GPU and the host wait for each other."""
    with _Functions(), _Operations():
        yield


@check
def check_capturable(
    model: Any,
    atoms: ase.Atoms | Sequence[ase.Atoms],
    outputs: Iterable[str] | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Check that no steady evaluation of a neighbour list waits for the host (collective).

    It is evaluated as in a run, whether the model's spec says that it can be captured or not; rows move a little in
    between. What a kernel or a library does by itself isn't seen.

    Parameters
    ----------
    model : Model, or anything that `ModelSource` takes
    atoms : Atoms or sequence of Atoms
    outputs : iterable of str, optional
        Default: all that the model can give.
    mesh : Mesh, optional
        Default: one rank.
    """
    model = ModelSource.of(model).load()
    mesh = Mesh.single(model.device) if mesh is None else mesh
    wanted = outputs_for(model, atoms) if outputs is None else frozenset(outputs)
    sharded = ShardedBatch.scatter(Batch.from_ase(atoms), mesh)
    config = DomainConfig(skin=0.1 * model.cutoff)
    spec = None if members_of(model) else _capturing(model.distribution_spec(config.strategy))
    distributed = DistributedModel(model, config, mesh, spec=spec)
    with distributed.steady("on"):
        for _ in range(2):  # from the second on a list is steady
            distributed(sharded, wanted)
        sharded.positions.add_(1e-3 * model.cutoff * torch.sin(sharded.ids[:, None].double()))
        with refuse_waiting():
            distributed.compute(sharded, wanted)


def _capturing(spec: MLIPSpec) -> MLIPSpec:
    return spec.replace(compile_policy=spec.compile_policy.replace(capture=True))
