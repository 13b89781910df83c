"""Runs a function in a fresh interpreter: what a spawned worker sees, with nothing imported before.

Key objects: `run_fresh`, `rows_without_torch`. Invariant: a child that hangs is ended after a time limit.
Layer: testing.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from nvdd_core.environment import child_environment, interpreter_command, search_path
from nvdd_core.testing.failures import ConformanceError

HEAVY: Final = ("torch", "numpy", "ase")
_LIMIT_S: Final = 240.0

_CALL = """
import pickle, pkgutil, sys
path, target, inner = pickle.load(sys.stdin.buffer)
sys.path[:] = path
value = pkgutil.resolve_name(target)(*pickle.loads(inner))
with open(sys.argv[1], "wb") as file:
    pickle.dump(value, file)
"""

_LIST = """
import json, sys
path, name, poisoned = json.load(sys.stdin)
sys.path[:] = path
for module in poisoned:
    sys.modules[module] = None
from nvdd_core.plugins import PluginManager, report
records = [r for r in PluginManager().records() if r.name == name]
rows = [{**report.plugin_row(r), "heavy": list(r.heavy), "traceback": r.traceback} for r in records]
with open(sys.argv[1], "w") as file:
    json.dump(rows, file)
"""


def run_fresh(target: str, *args: Any, timeout_s: float = _LIMIT_S) -> Any:
    """Call ``target(*args)`` in a new interpreter and return its result.

    Parameters
    ----------
    target : str
        ``"package.module:function"``.
    *args
        What can be pickled.
    timeout_s : float

    Raises
    ------
    ConformanceError
        When the child fails or takes too long; with the last lines that it wrote.
    """
    payload = pickle.dumps((search_path(), target, pickle.dumps(args)))
    return pickle.loads(_child(_CALL, payload, timeout_s, f"{target} in a new process"))


def rows_without_torch(plugin: str, timeout_s: float = _LIMIT_S) -> list[dict[str, Any]]:
    """Return how `nvdd plugins` lists a plugin where torch, numpy and ase can't be imported."""
    payload = json.dumps([search_path(), plugin, HEAVY]).encode()
    what = f"listing plugin '{plugin}' without {', '.join(HEAVY)}"
    rows: list[dict[str, Any]] = json.loads(_child(_LIST, payload, timeout_s, what))
    return rows


def _child(code: str, payload: bytes, timeout_s: float, what: str) -> bytes:
    """Run `code` with `payload` on standard input; return what it wrote into the file that it is given."""
    with tempfile.TemporaryDirectory(prefix="nvdd-conformance-") as folder:
        answer = Path(folder, "answer")
        command, env = interpreter_command("-c", code, str(answer)), child_environment()
        try:
            done = subprocess.run(
                command, input=payload, env=env, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConformanceError(f"{what}: no end after {timeout_s:.0f} s") from error
        if done.returncode != 0 or not answer.exists():
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            last = lines[-1] if lines else f"exit code {done.returncode}, no message"
            raise ConformanceError(f"{what} failed: {last}")
        return answer.read_bytes()
