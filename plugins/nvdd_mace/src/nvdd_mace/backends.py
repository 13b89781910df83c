"""Fused kernels: mace's own converters, and a check of what they give.

Key objects: `require_backend`, `converted`, `KeptRows`. The hooks that distribute a model look at rows only, so they
serve converted models as they are. Layer: plugin.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

import torch

from nvdd_core.errors import InputError
from nvdd_mace.foreign import built_in, imported
from nvdd_mace.trial import trial_cluster, trial_forces

if TYPE_CHECKING:
    from nvdd_mace.model import MaceModel

# converter and the packages that it needs
BACKENDS = {
    "cueq": ("mace.cli.convert_e3nn_cueq", ("cuequivariance", "cuequivariance_torch")),
    "oeq": ("mace.cli.convert_e3nn_oeq", ("openequivariance",)),
}
_ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-3}


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
    if backend == "cueq":
        keep_rows(found.module)
    error = disagreement(model, found)
    warnings.warn(f"mace: forces by {backend} differ by at most {error:.1e} eV/A from e3nn's", stacklevel=2)
    if not error < _ALLOWED[model.dtype]:
        raise InputError(
            f"mace: with backend={backend} forces differ by {error:.1e} eV/A from e3nn's, more than the "
            f"{_ALLOWED[model.dtype]:.0e} that rounding explains; use backend=e3nn"
        )
    return found


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
    """Gives a convolution the same number of rows again, as rows come and go.

    cuEquivariance times its kernels anew for each number of rows that edges point into (0.6 to 3 s), which changes on
    several ranks whenever atoms migrate. So rows of zeros, to which no edge points, are put below, up to a number that
    is kept: first what is needed, an eighth more than that once it didn't do.
    """

    def __init__(self) -> None:
        self.kept = 0
        self.given = 0

    def before(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put rows below those of the first argument; a forward pre-hook."""
        rows = args[0]
        n = self.given = rows.shape[0]
        if n > 2 * self.kept or 2 * n < self.kept:  # another system
            self.kept = n
        elif n > self.kept:
            self.kept = n + n // 8
        if n == self.kept:
            return args
        return torch.nn.functional.pad(rows, (0, 0, 0, self.kept - n)), *args[1:]

    def after(self, module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Take them away again; a forward hook."""
        return output[: self.given]


def keep_rows(module: torch.nn.Module) -> None:
    """Hook `KeptRows` into each fused convolution of a converted module."""
    for name, part in module.named_modules():
        if name.endswith(".conv_tp") and hasattr(part, "original_forward"):
            rows = KeptRows()
            part.register_forward_pre_hook(rows.before)
            part.register_forward_hook(rows.after)


def disagreement(one: MaceModel, other: MaceModel) -> float:
    """Return the largest difference of a force component, eV/Angstrom, on a cluster of the model's elements."""
    cluster = trial_cluster(one)
    return float((trial_forces(one, cluster) - trial_forces(other, cluster)).abs().max())
