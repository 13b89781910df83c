"""Reads a pickled module as plain data: nothing that the file names is imported or called.

Key objects: `read_records`, `require_checkpoint`, `Record`. The file is loaded by torch with ``weights_only=True`` and
an allow-list in which every name of mace, e3nn and torch that a model file needs stands for an inert record, not for
the code of that name. So neither the Python in the file (torch.fx graphs carry their source) nor the TorchScript (e3nn
stores compiled functions as bytes) is run, and no ``__setstate__`` of foreign classes.

Invariant: a name that is not on the list is refused before anything is read. Layer: plugin.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final, Self, cast

import numpy as np
import torch

from nvdd_core.errors import InputError

# Names that stand for records; classes and functions alike, since neither is called.
_DATA: Final = re.compile(
    r"(mace|e3nn|torch\.nn|torch\.fx)(\.\w+)+"
    r"|torch\._C\._nn\.\w+"
    r"|torch\.(tanh|abs|relu|sigmoid)"
    r"|builtins\.getattr|torch\._C\._VariableFunctionsClass"  # together, see `_Function`
    r"|numpy\.(dtype|ndarray)"
    r"|numpy\.(_core|core)\.multiarray\.(scalar|_reconstruct)"
)
_GETATTR: Final = "builtins.getattr"
_FUNCTIONS: Final = "torch._C._VariableFunctionsClass"
_TAKEN: Final = ("abs", "tanh")
_BLOCK: Final = 1 << 20  # bytes
GRAPH: Final = "torch.fx.graph_module.reduce_graph_module"


class Record:
    """Something in the file, by the name of its class or function, with what it was given.

    Attributes
    ----------
    path : str
        The name in the file, ``package.module.name``.
    args : tuple
        What the class or function would have been called with.
    state : object
        What ``__setstate__`` would have been given; for a module its ``__dict__``.
    """

    path: str = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Self:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def attributes(self) -> dict[str, Any]:
        """The state where it is a dictionary, else nothing."""
        return self.state if isinstance(self.state, dict) else {}

    def part(self, kind: str) -> dict[str, Any]:
        """Return ``_modules``, ``_parameters`` or ``_buffers`` of a module."""
        return dict(self.attributes.get(kind) or {})

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, submodule, buffer or parameter of a module."""
        for found in (self.attributes, *map(self.part, ("_modules", "_buffers", "_parameters"))):
            if name in found:
                return found[name]
        return default

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


class _Function(Record):
    """What stands for ``getattr``, by which pickle writes functions of torch; nothing is taken of anything.

    Only gates of mace, as attributes of the class that has torch's functions, are known; all else is an error.
    """

    def __new__(cls, *args: Any) -> Self:
        """Make the record of ``torch.abs`` or ``torch.tanh``."""
        owner, name = args if len(args) == 2 else (None, None)
        known = isinstance(owner, type) and issubclass(owner, Record) and owner.path == _FUNCTIONS
        if not (known and isinstance(name, str) and name in _TAKEN):
            raise InputError(f"takes {name!r} of {getattr(owner, 'path', owner)!r} by getattr")
        made = super().__new__(cls)
        made.path = f"torch.{name}"
        return made


def read_records(path: Path) -> Any:
    """Return what a file holds, its objects as records.

    Raises
    ------
    InputError
        When it isn't there, is no file of torch, is TorchScript, or names something that no model file needs.
    """
    require_checkpoint(path)
    _check_archive(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        raise InputError(f"mace: {path} can't be read as a file of torch.save: {error}") from error
    strange = sorted(name for name in names if not _DATA.fullmatch(name))
    if strange:
        raise InputError(
            f"mace: {path} names {', '.join(strange[:4])}{', ...' if len(strange) > 4 else ''}, which the files of "
            "mace don't; nothing of it was run. If you trust whoever made it, let it run code: --option trust=true"
        )
    stand_ins = [(_stand_in(name), name) for name in sorted(names)]
    try:
        with torch.serialization.safe_globals(cast(Any, stand_ins)):
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise InputError(
            f"mace: {path} can't be read as data ({type(error).__name__}: {str(error).splitlines()[0]}); nothing of it "
            "was run. If you trust whoever made it, let it run code: --option trust=true"
        ) from error


def _stand_in(name: str) -> type[Record]:
    base = _Function if name == _GETATTR else Record
    return type(name.rpartition(".")[2], (base,), {"path": name})


def require_checkpoint(path: Path) -> None:
    """Refuse what is no file.

    Raises
    ------
    InputError
        When it isn't there, or is a folder.
    """
    if not path.is_file():
        raise InputError(
            f"mace: {path} is a folder; give the .model file"
            if path.is_dir()
            else f"mace: there is no file {path}"
        )


def _check_archive(path: Path) -> None:
    """Refuse what torch would misread, and damaged numbers, which it would read: it compares no checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise InputError(
                    f"mace: {path} is TorchScript, which is code and can't be distributed; give the .model file "
                    "from before compilation"
                )
            for part in archive.infolist():
                if part.CRC:  # torch can be told to write none
                    _read_through(archive, part)
    except zipfile.BadZipFile as error:
        raise InputError(
            f"mace: {path} is no file of torch.save (or one from before torch 1.6), or a damaged one: {error}; give a "
            ".model file of mace-torch"
        ) from error
    except (OSError, EOFError, RuntimeError, zlib.error) as error:
        raise InputError(f"mace: {path} can't be read: {error}") from error


def _read_through(archive: zipfile.ZipFile, part: zipfile.ZipInfo) -> None:
    with archive.open(part) as stream:
        while stream.read(_BLOCK):  # the end compares the checksum
            pass


def plain(value: Any) -> Any:
    """Return a value of the file as plain Python where it is one: irreps, named tuples, numbers of numpy.

    Irreps become tuples ``(mul, l, p)``, named tuples become tuples; functions and anything else become their path.
    """
    if isinstance(value, Record):
        return _plain_record(value)
    if isinstance(value, type) and issubclass(value, Record):  # a function, such as an activation
        return value.path
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def _plain_record(value: Record) -> Any:
    if value.path.endswith("multiarray.scalar"):
        kind, data = value.args
        return np.frombuffer(_bytes(data), dtype=np.dtype(str(kind.args[0])))[0].item()
    if value.name == "Irreps":
        return tuple(plain(item) for item in (value.args[0] if value.args else ()))
    if value.name == "_MulIr":
        mul, irrep = value.args if len(value.args) == 2 else value.args[0]
        return (mul, *plain(irrep))
    if value.name == "Irrep":
        return tuple(value.args if len(value.args) == 2 else value.args[0])
    if value.name == "Instruction":
        return tuple(plain(item) for item in value.args)
    return value.path


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else str(data).encode("latin1")
