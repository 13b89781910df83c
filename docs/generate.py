"""Rewrites the marked blocks of the documentation from what the program says today.

A block stands between two comments in a Markdown file::

    <!-- generated: nvdd run --help -->   output of a command that is the same on every machine
    <!-- sample: nvdd evaluate ... -->    output that depends on the machine; rewritten with --samples only
    <!-- file: docs/examples/x.py -->     a file of this checkout
    <!-- step: nvdd new-plugin x -->      a command of the page's session: its steps run one after the other in one
                                          new folder and one new environment, from the top of the page
    <!-- step-sample: pytest -q -->       a step whose output depends on the machine
    <!-- do: cp ... -->                   a step that isn't shown; it has no end. $DOCS is this folder

    <!-- /generated -->, <!-- /sample -->, <!-- /file -->, <!-- /step -->, <!-- /step-sample --> end the others.

``python docs/generate.py`` rewrites generated and file blocks, ``--samples`` the samples and sessions too,
``--check`` rewrites nothing and exits with 1 where a block is stale. Names of pages limit all of it to these.
Invariant: text outside the blocks is never changed. Layer: none (a script beside the package).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("generated", "file")
STEPS = ("step", "step-sample")
_BLOCK = re.compile(
    r"^<!-- (?P<kind>generated|sample|file|step|step-sample): (?P<what>.*?) -->\n(?P<body>.*?)^<!-- /(?P=kind) -->$"
    r"|^<!-- do: (?P<do>.*?) -->$",
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
        if found["do"]:
            continue
        line = text.count("\n", 0, found.start()) + 1
        yield Block(path, line, found["kind"], found["what"], found["body"])


def body(kind: str, what: str) -> str:
    """Return what stands in a block today."""
    if kind == "file":
        language = {".py": "python", ".toml": "toml", ".diff": "diff"}.get(Path(what).suffix, "text")
        return f"```{language}\n{(ROOT / what).read_text(encoding='utf-8').rstrip()}\n```\n"
    return _shown(what, output(what))


def _shown(command: str, said: str) -> str:
    return f"```text\n$ {command}\n{said}".rstrip() + "\n```\n"


def output(command: str, folder: Path = ROOT, *, check: bool = False, **env: str) -> str:
    """Run a command line, by default in the checkout's root, as a user of this environment would."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NVDD_", "SLURM_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    fixed = {"PATH": path, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**kept, **fixed, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    said = done.stdout.replace(f"{ROOT}/", "").replace(
        f"{folder}/", ""
    )  # where a checkout is, nobody wants to know
    return "\n".join(line.rstrip() for line in said.splitlines()) + "\n"


class Session:
    """A folder and an environment of their own for the steps of a page, with what this environment has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        (site,) = venv.glob("lib/python*/site-packages")
        # What this interpreter's environment has is there too; what the session installs is there alone.
        parent = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (site / "parent.pth").write_text(parent, encoding="utf-8")
        for name, module in (("nvdd", "nvdd_core.cli.main"), ("pip", "pip"), ("pytest", "pytest")):
            script = venv / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{venv}/bin/python" -m {module} "$@"\n', encoding="utf-8")
            script.chmod(0o755)
        self._env = {
            "PATH": os.pathsep.join([f"{venv}/bin", str(Path(sys.executable).parent), os.environ["PATH"]]),
            "DOCS": str(ROOT / "docs"),
            # Everything needed is there, so nothing is asked of an index.
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling of "no isolation"
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, command: str, *, check: bool = False) -> str:
        """Run one step and return what it says; with `check`, it must not fail."""
        return output(command, self.folder, check=check, **self._env)


def rewrite(path: Path, *, samples: bool) -> bool:
    """Bring the blocks of a file up to date and return whether that changed it."""
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="nvdd-docs-") as folder:
        has_session = samples and any(block.kind in STEPS for block in blocks(path))
        session = Session(Path(folder)) if has_session else None
        fresh = _BLOCK.sub(lambda found: _renewed(found, session, samples=samples), text)
    if fresh != text:
        path.write_text(fresh, encoding="utf-8")
    return fresh != text


def _renewed(found: re.Match[str], session: Session | None, *, samples: bool) -> str:
    kind, what = found["kind"], found["what"]
    if found["do"]:
        if session is not None:
            session.run(found["do"], check=True)
        return found[0]
    if kind not in CHECKED and not samples:
        return found[0]
    fresh = _shown(what, session.run(what)) if session and kind in STEPS else body(kind, what)
    return f"<!-- {kind}: {what} -->\n{fresh}<!-- /{kind} -->"


def played(path: Path, session: Session, skip: str = "pytest") -> Iterator[tuple[Block, str]]:
    """Run the session of a page; yield each shown step with what it says today, but for those that hold `skip`."""
    text = path.read_text(encoding="utf-8")
    shown = {block.line: block for block in blocks(path)}
    for found in _BLOCK.finditer(text):
        block = shown.get(text.count("\n", 0, found.start()) + 1)
        if found["do"]:
            session.run(found["do"], check=True)
        elif block is not None and block.kind in STEPS and skip not in block.what:
            yield block, _shown(block.what, session.run(block.what))


def main() -> int:
    """Rewrite or check; return the exit code."""
    parser = argparse.ArgumentParser(description="Rewrites the marked blocks of the documentation.")
    parser.add_argument("--samples", action="store_true", help="Rewrite the machine-dependent blocks too.")
    parser.add_argument("--check", action="store_true", help="Rewrite nothing; fail where a block is stale.")
    parser.add_argument("page", nargs="*", help="Only these pages, such as docs/run.md.")
    args = parser.parse_args()
    chosen = [Path(name).resolve() for name in args.page] or pages()
    if args.check:
        marked = [block for page in chosen for block in blocks(page) if block.kind in CHECKED]
        stale = [block for block in marked if block.body != body(block.kind, block.what)]
        for block in stale:
            print(f"{block.path.relative_to(ROOT)}:{block.line}: stale: {block.what}")
        return 1 if stale else 0
    for page in chosen:
        if rewrite(page, samples=args.samples):
            print(f"rewrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
