"""Fused kernels: mace's own converters, and a check of what they give.

Key objects: `require_backend`, `converted`, `KeptRows`. The hooks that distribute a model look at rows only, so they
serve converted models as they are. Layer: plugin.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nvdd_core.errors import InputError
from nvdd_core.runtime import current_dd_context
from nvdd_mace.adapters import summed_rows
from nvdd_mace.foreign import built_in, imported
from nvdd_mace.inspection import are_of_float32
from nvdd_mace.repulsion import settle_repulsion
from nvdd_mace.trial import trial_cluster, trial_forces

if TYPE_CHECKING:
    from nvdd_mace.model import MaceModel

# converter and the packages that it needs
BACKENDS = {
    "cueq": ("mace.cli.convert_e3nn_cueq", ("cuequivariance", "cuequivariance_torch")),
    "oeq": ("mace.cli.convert_e3nn_oeq", ("openequivariance",)),
}
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}
# What float32 constants of a file explain in float64: converters make them anew. Some 1e-8 of a force is usual.
_ALLOWED_OF_FLOAT32 = 1e-5
_TOLD: dict[Any, Any] = {}


def require_backend(backend: str) -> None:
    """Refuse what is no backend or isn't installed, before a file is read.

    Raises
    ------
    InputError
        Naming the backends, or the missing packages.
    """
    if backend == "e3nn":
        return
    if backend not in BACKENDS:
        raise InputError(f"mace: backend is {backend!r}; give e3nn, {' or '.join(BACKENDS)}")
    missing = [name for name in BACKENDS[backend][1] if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"mace: backend={backend} needs {' and '.join(missing)}, which can't be imported here"
        )


def converted(model: MaceModel, backend: str) -> MaceModel:
    """Return the model with the kernels of a backend; warns with the largest difference in a force from e3nn's.

    Coupling coefficients of a file that was made in float32 are rounded to it, and e3nn keeps them. Kernels that
    have their own, in the model's dtype, give forces in float64 that differ by more than rounding of sums explains.

    Raises
    ------
    InputError
        When it can't convert the model, or computes something else.
    """
    converter, _ = BACKENDS[backend]
    module = _run(model, converter)
    found = copy.copy(model)
    trainable = any(p.requires_grad for p in model.module.parameters())
    found.module = module.to(dtype=model.dtype, device=model.device).eval().requires_grad_(trainable)
    settle_repulsion(found.module)
    if backend == "cueq":
        keep_rows(found.module)
    _check(model, found, backend)
    return found


def _check(model: MaceModel, found: MaceModel, backend: str) -> None:
    """Tell how much forces differ, or refuse the converted model."""
    error, allowed, why = disagreement(model, found), _ALLOWED[model.dtype], "rounding explains"
    told = f"mace: forces by {backend} differ by at most {error:.1e} eV/A from e3nn's"
    if not error < allowed and model.dtype == torch.float64 and are_of_float32(model.module.parameters()):
        allowed, why = _ALLOWED_OF_FLOAT32, "constants of a file made in float32 explain"
        told += f": the file was made in float32 and has constants of it, {backend} makes its own in float64"
    if not error < allowed:
        raise InputError(
            f"mace: with backend={backend} forces differ by {error:.1e} eV/A from e3nn's, more than the {allowed:.0e} "
            f"that {why}; use backend=e3nn"
        )
    # not at a line of source, which would be printed and say nothing
    warnings.warn_explicit(told, UserWarning, "nvdd-mace", 0, module=__name__, registry=_TOLD)


def _run(model: MaceModel, converter: str) -> torch.nn.Module:
    """Convert a copy of the model's module.

    mace's flag ``use_reduced_cg`` tells the coupling basis that was asked for; which one a file has depends also on
    whether cuEquivariance was installed where it was made. So the other is tried where weights don't fit the one.
    """
    run = imported(converter).run
    told = bool(getattr(model.module, "use_reduced_cg", False))
    failures = []
    for reduced in (told, not told):
        source = copy.deepcopy(model.module)
        source.use_reduced_cg = reduced
        try:
            with built_in(model.dtype):
                made: torch.nn.Module = run(source, return_model=True, device=model.device.type)
            return made
        except (RuntimeError, KeyError) as error:
            failures.append(error)
    raise InputError(
        f"mace: mace's converter {converter} can't convert this model ({type(failures[0]).__name__}: {failures[0]}); "
        "use backend=e3nn"
    ) from failures[0]


class KeptRows:
    """Calls a fused convolution with numbers of rows that seldom change, and for no ghost's sum.

    cuEquivariance times its kernels anew for each number of rows that edges point into (0.6 to 3 s), those of the
    derivative into senders too, and both change on several ranks whenever atoms migrate. So rows of zeros, to which no
    edge points, are put below, up to a number that is kept: first what is needed, an eighth more than that once it
    didn't do. On a padded domain numbers stay by themselves.

    Parameters
    ----------
    fused : callable
        ``forward`` of a ``cuequivariance_torch.SegmentedPolynomial`` as mace calls it: weights, rows and edges'
        attributes; which row each edge takes; a tensor with as many rows as are to be summed into; which one each edge
        goes to.
    """

    def __init__(self, fused: Callable[..., Any]) -> None:
        self._fused = fused
        self._senders, self._receivers = _Room(), _Room()

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        senders: dict[int, torch.Tensor],
        shapes: dict[int, torch.Tensor],
        receivers: dict[int, torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the one output, of owned rows only where edges enter no other."""
        weights, rows, attributes = inputs
        n = rows.shape[0]
        wanted = summed_rows(n)
        sent, summed = n, wanted
        if not current_dd_context().padded:
            sent, summed = self._senders.holding(n), self._receivers.holding(wanted)
        rows = rows if sent == n else torch.nn.functional.pad(rows, (0, 0, 0, sent - n))
        shape = shapes[0] if summed == n else rows.new_empty((1, 1)).expand(summed, 1)
        (out,) = self._fused([weights, rows, attributes], senders, {0: shape}, receivers)
        return [out[:wanted]]


class _Room:
    """A number of rows that is kept."""

    def __init__(self) -> None:
        self._kept = 0

    def holding(self, n: int) -> int:
        """Return the number kept for `n` rows."""
        if n > 2 * self._kept or 2 * n < self._kept:  # another system
            self._kept = n
        elif n > self._kept:
            self._kept = n + n // 8
        return self._kept


def keep_rows(module: torch.nn.Module) -> None:
    """Put `KeptRows` around each fused convolution of a converted module."""
    for name, part in module.named_modules():
        if name.endswith(".conv_tp") and hasattr(part, "original_forward"):
            part.original_forward = KeptRows(part.original_forward)


def disagreement(one: MaceModel, other: MaceModel) -> float:
    """Return the largest difference of a force component, eV/Angstrom, on a cluster of the model's elements."""
    cluster = trial_cluster(one)
    return float((trial_forces(one, cluster) - trial_forces(other, cluster)).abs().max())
