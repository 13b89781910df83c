"""Which line of the model's code is at work: the innermost frame outside torch and the standard library.

Where that frame is nvdd's own, an operation is part of a verb or of the framework and has no line of the model; what
wraps foreign functions for adapters is looked through.

Layer: validate.
"""

from __future__ import annotations

import re
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

import nvdd_core
from nvdd_core.validate.findings import Place

_TORCH, _NVDD = (str(Path(str(package.__file__)).parent) + "/" for package in (torch, nvdd_core))
_WRAPPERS = _NVDD + "adapters/"
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_INSTALLED = tuple({sysconfig.get_paths()[key] + "/" for key in ("purelib", "platlib")})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_TYPED_IN = ("<string>", "<stdin>", "<ipython")  # other names in brackets are generated code


@cache
def is_model_code(file: str) -> bool:
    """Tell whether a file is neither torch's, nvdd's nor the standard library's; it may be foreign code."""
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)
    if file.startswith((_TORCH, _NVDD)):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


@cache
def is_nvdd_code(file: str) -> bool:
    """Tell whether a file is nvdd's own, wrappers of adapters left out."""
    return file.startswith(_NVDD) and not file.startswith(_WRAPPERS)


def model_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame at or above `frame` that isn't torch's, if it is the model's."""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_model_code(file):
            return frame
        if is_nvdd_code(file):
            return None
        frame = frame.f_back
    return None


def place_of(frame: FrameType, module: str = "") -> Place:
    """Return the line that `frame` is at."""
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno, code.co_qualname, module)


def place_in_traceback(text: str) -> Place | None:
    """Return the last line of the model's code that a traceback names."""
    found = [match for match in _FRAME.finditer(text) if is_model_code(match["file"])]
    return Place(found[-1]["file"], int(found[-1]["line"]), found[-1]["function"]) if found else None
