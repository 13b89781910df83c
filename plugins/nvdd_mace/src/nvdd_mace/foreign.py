"""mace and e3nn, imported and called so that the process is afterwards what it was before.

Key objects: `modules`, `o3`, `e3nn_root`, `built_in`. Importing mace tells torch by an environment variable to run code
of any file that it loads, prints a line and warns; mace's constructors take dtypes from torch's default. None of it
is left to the process: this is the only module of the plugin that imports mace. Layer: plugin.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch

_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_DTYPE_LOCK = threading.RLock()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what mace prints, warns and writes to the environment in the body."""
    before = os.environ.get(_VARIABLE)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = before


def imported(name: str) -> ModuleType:
    """Import a module of mace or e3nn quietly."""
    if name in sys.modules:
        return sys.modules[name]
    with quiet():
        # e3nn 0.4.4 reads a table of its own by torch.load, which needs what mace sets
        os.environ[_VARIABLE] = "1"
        importlib.import_module("mace")
        return importlib.import_module(name)


@contextlib.contextmanager
def built_in(dtype: torch.dtype) -> Iterator[None]:
    """Let mace's constructors take `dtype`; torch's default and random state are put back whatever happens.

    cuEquivariance keeps coupling coefficients for the whole process in the dtype in which they were asked for first.
    So they are forgotten before, or a model of float64 would have those of one of float32 that was made earlier, and
    after, for those who make models by themselves.
    """
    with _DTYPE_LOCK, torch.random.fork_rng(devices=[]), quiet():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        _forget_coefficients()
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            _forget_coefficients()


def _forget_coefficients() -> None:
    """Empty what functions of cuEquivariance keep, if it was imported; it has no call of its own for it."""
    loaded = [part for name, part in sys.modules.items() if name.split(".")[0] == "cuequivariance"]
    for key, value in [item for part in loaded for item in vars(part).items()]:
        if hasattr(value, "cache_clear"):
            value.cache_clear()
        elif key.startswith("_cache") and isinstance(value, dict):
            value.clear()


modules = imported("mace.modules")
o3 = imported("e3nn.o3")
e3nn_root = imported("e3nn")
