"""Rewrites the marked blocks of the documentation from what the program says today.

A block stands between two comments in a Markdown file::

    <!-- generated: nvdd run --help -->   output of a command that is the same on every machine
    <!-- sample: nvdd evaluate ... -->    output that depends on the machine; rewritten with --samples only
    <!-- file: docs/examples/x.py -->     a file of this checkout

    <!-- /generated -->, <!-- /sample -->, <!-- /file --> end them.

``python docs/generate.py`` rewrites generated and file blocks, ``--samples`` the samples too, ``--check`` rewrites
nothing and exits with 1 where a block is stale. Invariant: text outside the blocks is never changed.
Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("generated", "file")
_BLOCK = re.compile(
    r"^<!-- (?P<kind>generated|sample|file): (?P<what>.*?) -->\n(?P<body>.*?)^<!-- /(?P=kind) -->$",
    flags=re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One marked block of a file."""

    path: Path
    line: int
    kind: str
    what: str
    body: str


def pages() -> list[Path]:
    """Return the files that may hold blocks."""
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> Iterator[Block]:
    """Yield the blocks of a file from top to bottom."""
    text = path.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path, line, found["kind"], found["what"], found["body"])


def body(kind: str, what: str) -> str:
    """Return what stands in a block today."""
    if kind == "file":
        language = {".py": "python", ".toml": "toml"}.get(Path(what).suffix, "text")
        return f"```{language}\n{(ROOT / what).read_text(encoding='utf-8').rstrip()}\n```\n"
    return f"```text\n$ {what}\n{output(what).rstrip()}\n```\n"


def output(command: str) -> str:
    """Run a command line in the checkout's root, as a user of this interpreter's environment would."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NVDD_", "SLURM_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**kept, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def rewrite(path: Path, *, samples: bool) -> bool:
    """Bring the blocks of a file up to date and return whether that changed it."""
    text = path.read_text(encoding="utf-8")

    def renewed(found: re.Match[str]) -> str:
        kind, what = found["kind"], found["what"]
        if kind == "sample" and not samples:
            return found[0]
        return f"<!-- {kind}: {what} -->\n{body(kind, what)}<!-- /{kind} -->"

    fresh = _BLOCK.sub(renewed, text)
    if fresh != text:
        path.write_text(fresh, encoding="utf-8")
    return fresh != text


def main() -> int:
    """Rewrite or check; return the exit code."""
    parser = argparse.ArgumentParser(description="Rewrites the marked blocks of the documentation.")
    parser.add_argument("--samples", action="store_true", help="Rewrite the machine-dependent blocks too.")
    parser.add_argument("--check", action="store_true", help="Rewrite nothing; fail where a block is stale.")
    args = parser.parse_args()
    if args.check:
        marked = [block for page in pages() for block in blocks(page) if block.kind in CHECKED]
        stale = [block for block in marked if block.body != body(block.kind, block.what)]
        for block in stale:
            print(f"{block.path.relative_to(ROOT)}:{block.line}: stale: {block.what}")
        return 1 if stale else 0
    for page in pages():
        if rewrite(page, samples=args.samples):
            print(f"rewrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
