"""Prints the ratios that matter, each measured in one run on this machine.

(a) nvdd's Lennard-Jones against LAMMPS ``lj/cut``, one process each, 32,000 argon atoms: at least 0.5;
(b) two ranks on two cores against one: at least 1.7;
(c) what a step spends outside the model and the neighbour list, 32,000 atoms a rank: at most 15 %;
(d) ``nvdd plugins``: below 0.25 s and without torch;
(e) peak memory a rank, 4 ranks against 1, 256,000 atoms: below 0.35.

``python -m benchmarks.bench [a b c d e] [--json PATH]``. Measurements that are compared alternate, the best of each
counts: other programs on the machine can only slow one down.

Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lammps_reference import measure_lammps
from benchmarks.md import argon, measure

ROUNDS = 3
OUTSIDE = ("exchange", "reduce", "integrate", "write", "rebuild")


def against_lammps() -> dict[str, Any]:
    """(a); each with the skin that suits it best here: 2 A for nvdd, 1 A for LAMMPS."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(measure(32_000)["atom_steps_per_s"])
        theirs.append(
            measure_lammps(32_000, epsilon=0.0103, sigma=3.4, cutoff=8.5, skin=1.0).atom_steps_per_s
        )
    return {"nvdd": max(ours), "lammps": max(theirs), "ratio": max(ours) / max(theirs), "target": ">= 0.5"}


def two_ranks() -> dict[str, Any]:
    """(b)."""
    one, two = [], []
    for _ in range(ROUNDS):
        one.append(measure(32_000)["steps_per_s"])
        two.append(measure(32_000, 2)["steps_per_s"])
    return {"one": max(one), "two": max(two), "ratio": max(two) / max(one), "target": ">= 1.7"}


def overhead() -> dict[str, Any]:
    """(c), on one rank and on two ranks of 32,000 atoms."""
    out: dict[str, Any] = {"target": "<= 0.15"}
    for ranks in (1, 2):
        shares = []
        for _ in range(ROUNDS):
            result = measure(32_000 * ranks, ranks)
            step_ms = 1e3 / result["steps_per_s"]
            phases = [r["ms_per_step"] for r in result["per_rank"]]
            inside = min(p["model"] + p["neighbor_list"] for p in phases)
            shares.append(1.0 - inside / step_ms)
        out[f"ratio_{ranks}"] = min(shares)
        out[f"phases_{ranks}"] = phases
    out["ratio"] = out["ratio_1"]
    return out


def listing() -> dict[str, Any]:
    """(d)."""
    code = "import sys, nvdd_core.cli.main as m; sys.argv=['nvdd','plugins']\ntry: m.main()\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, file=sys.stderr)"
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - begin)
    return {"ratio": min(times), "torch": done.stderr.strip().endswith("True"), "target": "< 0.25 s"}


def memory() -> dict[str, Any]:
    """(e), with the structure read from a file on rank 0."""
    import ase.io

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "argon.traj"))
        ase.io.write(path, argon(256_000))
        quick = {"file": path, "steps": 10, "warm_up": 2, "repeats": 1}
        peaks = {n: max(r["peak_mb"] for r in measure(256_000, n, **quick)["per_rank"]) for n in (1, 4)}
    return {"one_mb": peaks[1], "four_mb": peaks[4], "ratio": peaks[4] / peaks[1], "target": "< 0.35"}


PARTS = {"a": against_lammps, "b": two_ranks, "c": overhead, "d": listing, "e": memory}


def main() -> None:
    """Measure the parts asked for and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    results = {}
    for name in args.parts or PARTS:
        results[name] = PARTS[name]()
        shown = {k: v for k, v in results[name].items() if not k.startswith("phases")}
        text = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
        print(f"({name}) {text}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
