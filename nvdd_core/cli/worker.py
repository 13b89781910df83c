"""Entry point of one worker process: ``python worker.py LAUNCH_FOLDER``, started by `nvdd_core.cli.launch`.

Run as a file, not as a module: it first takes over the module search path of the starting process, so that a
worker finds the very plugins that the user's process found.

Invariant: the process ends when its parent does, and after a failure without waiting for anybody.
Layer: cli.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Prepare this process and do its share of the work."""
    # An interrupt ends a worker at once, even one that waits inside a collective; the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    order = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    sys.path[:] = order["sys_path"]

    # Imported here: the search path has to be right first.
    from nvdd_core.environment import end_with_parent

    end_with_parent(order["parent"])  # before torch is imported, which takes seconds

    from nvdd_core.cli.launch import work
    from nvdd_core.cli.streams import ensure_streams

    ensure_streams()
    code = work(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        # Tearing down a broken process group can hang; there is nothing left that needs it.
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
