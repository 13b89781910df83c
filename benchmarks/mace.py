"""MACE on GPUs: the bare model, nvdd on one GPU and on several, and the closest peer, in one run.

``python -m benchmarks.mace [--backends e3nn cueq] [--atoms 8192 ...] [--json PATH]`` makes one model file with random
weights in the shape of MACE-MP-0 medium, measures everything on it in float32 and prints a table. ``--device cpu
--shape small --atoms 2048`` compares one and two CPU processes. The bare model is one evaluation with the graph given;
nvdd is a whole NVE step, neighbour list and migration included. A case that doesn't fit is a row that says so.

Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CELLS = {
    1_024: "4x4x8",
    2_048: "4x8x8",
    4_096: "8x8x8",
    8_192: "8x8x16",
    16_384: "8x16x16",
    32_768: "16x16x16",
    65_536: "16x16x32",
    131_072: "16x32x32",
    262_144: "32x32x32",
}
PEER_LIMIT = 240


class Table:
    """Runs cases and keeps what they print."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args, self.folder = args, folder
        self.model = args.model or str(Path(folder, "random.model"))
        self.rows: list[dict[str, Any]] = []
        if args.json and Path(args.json).exists():
            self.rows = json.loads(Path(args.json).read_text())
        if not Path(self.model).exists():
            self._run("make", "--shape", args.shape)

    def _run(self, *flags: str) -> list[dict[str, Any]]:
        where = ["--model", self.model, "--device", self.args.device]
        command = [sys.executable, "-m", "benchmarks.mace_cases", flags[0], *where, *flags[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
        if done.returncode:
            print(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def case(self, kind: str, backend: str, ranks: int = 1) -> None:
        """Measure one kind at every size, smallest first."""
        flags = [kind, "--backend", backend, "--ranks", str(ranks), "--steps", str(self.args.steps)]
        if backend != "e3nn":  # steps are short there
            flags[-1] = str(3 * self.args.steps)
        found = self._run(*flags, "--cells", *(CELLS[n] for n in self.args.atoms))
        self._keep(found, kind, backend, ranks)

    def peer(self, ranks: int) -> None:
        """Measure nvalchemi-toolkit, each size in processes of its own, until one doesn't fit."""
        for n in self.args.atoms:
            command = [sys.executable, "-m", "benchmarks.mace_peer", "--model", self.model]
            command += ["--cells", *CELLS[n].split("x"), "--ranks", str(ranks), "--timeout", str(PEER_LIMIT)]
            command += [] if self.args.peer_dynamics else ["--no-dynamics"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PEER_LIMIT + 60, check=False
            )
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            found = lines[-1:] or [{"atoms": n, "error": done.stderr[-2000:]}]
            self._keep(found, "peer", "e3nn", ranks)
            if "error" in found[0]:
                print(str(found[0]["error"])[-2000:], file=sys.stderr)
                break

    def _keep(self, found: list[dict[str, Any]], kind: str, backend: str, ranks: int) -> None:
        for row in found:
            row |= {"kind": kind, "backend": backend, "ranks": ranks}
            self.rows.append(row)
            print(self._line(row), flush=True)

    def of(self, kind: str, backend: str, ranks: int, atoms: int) -> dict[str, Any]:
        """Return the row of a case, empty if it was not measured or failed."""
        for row in self.rows:
            if (row["kind"], row["backend"], row["ranks"], row["atoms"]) == (kind, backend, ranks, atoms):
                return row if "ms" in row else {}
        return {}

    def _line(self, row: dict[str, Any]) -> str:
        name = {"bare": "bare mace", "peer": "nvalchemi"}.get(row["kind"], "nvdd")
        head = f"{row['backend']:5} {row['atoms']:>6} atoms  {name:9} {row['ranks']} "
        if "ms" not in row:
            return head + f"{str(row.get('error', 'failed')).strip().splitlines()[-1][:70]}"
        peak = row["peak_gb"]
        text = head + f"{row['ms']:8.1f} ms  peak {max(peak) if isinstance(peak, list) else peak:6.2f} GB"
        bare = self.of("bare", row["backend"], 1, row["atoms"])
        if row["kind"] != "bare" and bare:
            text += f"  {bare['ms'] / row['ms']:5.3f} x bare"
        ours = self.of("nvdd", row["backend"], row["ranks"], row["atoms"])
        if row["kind"] == "peer" and ours:
            text += f", nvdd is {row['ms'] / ours['ms']:.2f} x as fast"
        return text + self._details(row, bare)

    def _details(self, row: dict[str, Any], bare: dict[str, Any]) -> str:
        """What a step of nvdd spends outside the model, its memory beside the bare model's, its exchanges."""
        if row["kind"] != "nvdd":
            return ""
        outside = max(row["ms"] - r["phases_ms"]["model"] for r in row["per_rank"])
        calls = row["calls_per_step"]
        text = f", {outside:.1f} ms outside the model, {row['rebuilds_per_step']:.2f} rebuilds"
        if bare and bare["peak_gb"]:
            shares = [r["peak_gb"] / bare["peak_gb"] * row["atoms"] / r["owned"] for r in row["per_rank"]]
            text += f", memory {max(shares):.2f} x its share"
        one = self.of("nvdd", row["backend"], 1, row["atoms"])
        if row["ranks"] > 1 and one:
            cpu = one["per_rank"][0]["cpu_ms"] / max(r["cpu_ms"] for r in row["per_rank"])
            text += f", {one['ms'] / row['ms']:.2f} x one rank (processor time {cpu:.2f})"
        if row["ranks"] > 1:
            text += f", {calls.get('exchange', 0):.1f}+{calls.get('reverse', 0):.1f} exchanges"
            text += f" {row['mb_per_step']:.1f} MB"
        return text + (f"; {row['parity']}" if row.get("parity") else "")


def main() -> None:
    """Measure every case and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="medium")
    parser.add_argument("--backends", nargs="+", default=["e3nn"], help="e3nn, cueq")
    parser.add_argument("--atoms", type=int, nargs="+", default=[8_192, 16_384, 32_768, 65_536])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument(
        "--parts", nargs="+", default=["bare", "nvdd"], help="bare, nvdd, peer (nvalchemi-toolkit)"
    )
    parser.add_argument("--model", default="", help="file to keep the model in, and to take it from")
    parser.add_argument("--peer-dynamics", action="store_true", help="whole NVE steps of its, too")
    parser.add_argument("--json", default="", help="file to write; rows that it holds already are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = Table(args, folder)
        for backend in args.backends:
            if "bare" in args.parts:
                table.case("bare", backend)
            if "nvdd" in args.parts:
                table.case("nvdd", backend)
                table.case("nvdd", backend, args.ranks)
            if "peer" in args.parts and backend == "e3nn":
                table.peer(args.ranks)
        if args.json:
            Path(args.json).write_text(json.dumps(table.rows, indent=1))


if __name__ == "__main__":
    main()
