"""Structure files, read with ASE.

`read_structures` returns what a file holds; `constraint_names` says what of it nobody applies.

Invariant: what is read doesn't depend on how the interpreter was started. Layer: runtime.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ase

from nvdd_core.environment import child_environment, search_path
from nvdd_core.errors import InputError

# Readers of ASE do some of their work in assert statements: under ``python -O`` its reader of extended XYZ takes
# the line with the count for the comment. So an optimised interpreter has a plain one read for it. The child
# answers on the descriptor that its standard output had at the start, away from what a reader may print.
_CHILD = """
import json, os, pickle, sys
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
path, index, sys.path[:] = json.load(sys.stdin)
import ase.io
try:
    found = ase.io.read(path, index=index, do_not_split_by_at_sign=True)
except Exception as error:
    found = (type(error).__name__, str(error))
pickle.dump(found, answer, protocol=5)
answer.close()
"""


def read_structures(path: Path, index: str) -> list[ase.Atoms]:
    """Read systems of a file.

    Parameters
    ----------
    path : Path
    index : str
        As ASE takes it: ``"3"``, ``"-1"``, ``":"``, ``"0:10:2"``.

    Raises
    ------
    InputError
        When ASE can't read the file or it has no such system.
    """
    found = _read_apart(path, index) if sys.flags.optimize else _read_here(path, index)
    if isinstance(found, tuple):
        kind, text = found
        reason = (
            " ".join(text.split())
            or "it ends before that, is empty, or is of another format than its name says"
        )
        raise InputError(f"structure file {path}: ASE could not read system {index} of it: {kind}: {reason}")
    systems = [found] if isinstance(found, ase.Atoms) else list(found)
    if not systems:
        raise InputError(f"structure file {path}: there is no system {index} in it")
    for atoms in systems:
        _keep_charges(atoms)
    return systems


def _keep_charges(atoms: ase.Atoms) -> None:
    """Make a column ``charges`` an array like any other column: ASE takes it for a result of some calculation."""
    results = {} if atoms.calc is None else getattr(atoms.calc, "results", {})
    if "charges" in results and "charges" not in atoms.arrays:
        atoms.set_array("charges", results["charges"])


def constraint_names(systems: Iterable[ase.Atoms]) -> list[str]:
    """Return the kinds of ASE constraints that structures carry, each once."""
    return sorted({type(constraint).__name__ for atoms in systems for constraint in atoms.constraints})


def _read_here(path: Path, index: str) -> Any:
    """Return what was read, a structure or a list of them, or a tuple of the error's type and text."""
    import ase.io  # half a second, which only a process that reads should spend

    try:
        return ase.io.read(path, index=index, do_not_split_by_at_sign=True)
    except Exception as exc:  # ASE's readers raise whatever their parsers happen to raise
        return type(exc).__name__, str(exc)


def _read_apart(path: Path, index: str) -> Any:
    """Do the same in a process that is not optimised."""
    env = child_environment()
    env.pop("PYTHONOPTIMIZE", None)
    order = json.dumps([str(path), index, search_path()])
    done = subprocess.run(  # a fixed program, by our own interpreter
        [sys.executable, "-P", "-c", _CHILD],  # without the flags of `interpreter_command`
        input=order.encode(),
        stdout=subprocess.PIPE,
        env=env,
        check=False,
    )
    if done.returncode:
        return "ChildProcessError", f"the process that reads it ended with {done.returncode}"
    return pickle.loads(done.stdout)  # written by the program above
