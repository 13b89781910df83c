"""Argon dynamics on GPUs: steps/s at several sizes, the step's floor at 500 atoms, what a rebuild costs.

``python -m benchmarks.gpu [--ranks 1 2] [--atoms 500 4000 100000 1000000] [--json PATH]`` measures each case in
processes of its own and prints one line each. Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.md import measure

STEPS = {500: 2000, 4_000: 2000, 32_000: 1000, 100_000: 600, 256_000: 400, 1_000_000: 200}


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--atoms", type=int, nargs="+", default=[500, 4_000, 100_000, 1_000_000])
    parser.add_argument("--dtype", nargs="+", default=["float64"])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    results = []
    for dtype in args.dtype:
        for atoms in args.atoms:
            for ranks in args.ranks:
                result = measure(
                    atoms, ranks, device="cuda", dtype=dtype, steps=STEPS.get(atoms, 200), repeats=2
                )
                results.append(result)
                phases = {k: round(v, 3) for k, v in result["per_rank"][0]["ms_per_step"].items()}
                print(
                    f"{dtype} {result['atoms']:>8} atoms {ranks} GPU: {result['steps_per_s']:9.1f} steps/s "
                    f"{1e3 / result['steps_per_s']:7.3f} ms, rebuilds/step {result['rebuilds_per_step']:.4f}, "
                    f"ms {phases}",
                    flush=True,
                )
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
