"""O-46: worker processes of ours load the plugin that the program found, once each, however the program was started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests._spawn import ONE_THREAD
from tests.cli.conftest import fcc
from tests.cli.fake_plugin import install
from tests.plugins._fake import Fakes, good

COUNTED = (
    "\nimport os\nwith open(os.environ['COUNT'], 'a') as f:\n    f.write(f'{os.getpid()} {__name__}\\n')\n"
)
POOL = """
from nvdd_core.runtime.workers import WorkerPool
with WorkerPool(2, timeout_s=60) as pool:
    print(pool.run("ask:answer", "fake"))
"""
ASKED = """
from nvdd_core.plugins import default_manager
def answer(mesh, name):
    default_manager().model(name)
    return default_manager().model(name).name
"""
COMMAND = """
import sys
sys.path.insert(0, "plugin")
from nvdd_core.cli.main import main
print(main(["evaluate", "a.xyz", "--model", "fake", "--device", "cpu", "--ranks", "2", "--json", "out.json"]))
"""
STARTS = ("-c", "script", "stdin")


def start(
    how: str, program: str, folder: os.PathLike[str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program without a main guard."""
    command, given = [sys.executable, "-c", program], None
    if how == "script":
        with open(os.path.join(folder, "main.py"), "w", encoding="utf-8") as file:
            file.write(program)
        command = [sys.executable, "main.py"]
    elif how == "stdin":
        command, given = [sys.executable, "-"], program
    return subprocess.run(
        command, input=given, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.distributed
@pytest.mark.parametrize("how", STARTS)
def test_ranks_of_a_pool(fakes: Fakes, how: str) -> None:
    fakes.add("fake", good("fake") + COUNTED)
    (fakes.root / "ask.py").write_text(ASKED)
    count = fakes.root / "count"
    env = fakes.env("site", "", COUNT=str(count), **ONE_THREAD)
    done = start(how, POOL, fakes.root, env)
    assert done.stdout == "['fake', 'fake']\n", done.stderr
    loads = count.read_text().splitlines()
    assert len(loads) == len(set(loads)) == 2


@pytest.mark.distributed
@pytest.mark.parametrize("how", STARTS)
def test_ranks_of_a_command(tmp_path, how: str) -> None:
    plugin = install(tmp_path / "plugin")
    with (plugin / "fake_x" / "_plugin.py").open("a") as file:
        file.write(COUNTED)
    fcc(1).write(tmp_path / "a.xyz", format="extxyz")
    env = {**os.environ, **ONE_THREAD, "COUNT": str(tmp_path / "count")}
    env.pop("PYTHONPATH", None)
    done = start(how, COMMAND, tmp_path, env)  # the path to the plugin is set in the program alone
    assert done.stdout.splitlines()[-1] == "0", done.stderr
    loads = (tmp_path / "count").read_text().splitlines()
    assert len(loads) == len(set(loads)) == 3  # the program checks the model before it starts two ranks


@pytest.mark.distributed
def test_switches_reach_the_ranks(fakes: Fakes) -> None:
    """O-50: a plugin that ends whoever imports it is kept out of workers, too."""
    fakes.add("fake", good("fake"))
    fakes.add("killer", "import os\nos._exit(3)")
    (fakes.root / "ask.py").write_text(
        "from nvdd_core.plugins import default_manager\n"
        "def answer(mesh, name):\n"
        "    return [(r.name, r.status.value) for r in default_manager().records() if r.name in ('fake', 'killer')]\n"
    )
    env = fakes.env("site", "", **ONE_THREAD, NVDD_DISABLE_PLUGINS="killer")
    done = start("-c", POOL, fakes.root, env)
    assert done.stdout.count("('fake', 'ok'), ('killer', 'disabled')") == 2, done.stderr
