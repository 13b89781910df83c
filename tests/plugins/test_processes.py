"""Plugins in other processes: workers, ``python -O``, start-up cost, switches (O-44, O-46 to O-50)."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.plugins._fake import BROKEN, CLI, IMPORTS, INFO, Fakes, good, processor_time

COUNTED = "\nimport os\nwith open(os.environ['COUNT'], 'a') as f:\n    f.write(f'{os.getpid()}\\n')\n"
ASK = """
import os
from nvdd_core.plugins import default_manager
def ask(i):
    default_manager().model('fake')
    os.write(1, f"got {default_manager().model('fake').name}\\n".encode())  # in one piece, since two processes write
"""
HEAVY = "('torch', 'numpy', 'ase', 'warp', 'rich', 'pydantic')"
REFUSALS = """
import sys
from nvdd_core.errors import NvddError
from nvdd_core.plugins import ModelDecl, PluginManager, Ref
def tell(f):
    try: f()
    except NvddError as e: print(type(e).__name__, e)
    else: print('accepted')
tell(lambda: Ref('nonsense'))
tell(lambda: ModelDecl('Bad Name', Ref('a:b')))
for name in ('importerror', 'systemexit', 'syntaxerror', 'noattribute', 'stale', 'new', 'garbage',
             'zero', 'none', 'old', 'nobody'):
    tell(lambda: PluginManager().model(name))
"""


# -- O-44 --


def test_broken_plugins_stop_nothing(fakes: Fakes) -> None:
    fakes.add_broken()
    fakes.add("good", good("good"))
    rows = fakes.listing()
    assert rows["good"]["status"] == "ok"
    for name in BROKEN:
        row = rows[name]
        assert (row["status"], row["distribution"], row["version"]) == ("broken", f"fake-{name}", "1.0")
        assert row["target"].startswith(f"fake_{name}")
        assert row["reason"]
    assert fakes.nvdd("plugins").returncode == 0
    assert fakes.nvdd("--help").returncode == 0
    done = fakes.python("from nvdd_core.plugins import default_manager as m; print(m().loader('good'))")
    assert "Fraction" in done.stdout


def test_bad_plugin_by_name_fails_with_its_traceback(fakes: Fakes) -> None:
    fakes.add_broken()
    done = fakes.python("from nvdd_core.plugins import default_manager as m; m().model('importerror')")
    assert done.returncode == 1
    assert "fake_importerror.py" in done.stderr
    assert "ImportError: boom" in done.stderr
    assert "direct cause" in done.stderr


def test_strict_switch_makes_an_error(fakes: Fakes) -> None:
    fakes.add_broken()
    done = fakes.nvdd("plugins", NVDD_STRICT_PLUGINS="1")
    assert done.returncode == 2
    assert "importerror" in done.stdout  # the table is still there to read
    assert done.stderr.startswith("nvdd: error: plugin 'importerror'")


# -- O-46 --


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
@pytest.mark.parametrize("guard", ["script", "stdin"])
def test_workers_find_the_plugin_once(fakes: Fakes, method: str, guard: str) -> None:
    fakes.add("fake", good("fake") + COUNTED)
    (fakes.root / "ask.py").write_text(ASK)
    program = f"""
import multiprocessing as mp
from ask import ask
if __name__ == '__main__':
    context = mp.get_context('{method}')
    workers = [context.Process(target=ask, args=(i,)) for i in range(2)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    raise SystemExit(sum(worker.exitcode for worker in workers))
"""
    count = fakes.root / "count"
    env = fakes.env("site", "", COUNT=str(count))
    if guard == "script":
        (fakes.root / "main.py").write_text(program)
        command, given = [sys.executable, str(fakes.root / "main.py")], None
    else:
        command, given = [sys.executable, "-"], program
    done = subprocess.run(
        command, input=given, env=env, cwd=fakes.root, capture_output=True, text=True, timeout=60, check=False
    )
    if guard == "stdin" and method != "fork" and done.returncode:
        assert "No such file" in done.stderr  # Python's own word on a main module it can't import again
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("got fake") == 2
    loads = count.read_text().split()
    assert len(loads) == len(set(loads)) == 2


def test_path_set_in_the_program_reaches_spawned_workers(fakes: Fakes) -> None:
    fakes.add("fake", good("fake"), where="unlisted")
    (fakes.root / "site" / "ask.py").write_text(ASK)
    (fakes.root / "main.py").write_text(
        f"import sys; sys.path.insert(0, {str(fakes.root / 'unlisted')!r})\n"
        "import multiprocessing as mp\nfrom ask import ask\n"
        "if __name__ == '__main__':\n"
        "    p = mp.get_context('spawn').Process(target=ask, args=(0,)); p.start(); p.join(); sys.exit(p.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, str(fakes.root / "main.py")],
        env=fakes.env(), cwd=fakes.root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "got fake" in done.stdout, done.stderr


# -- O-47 --


def test_start_up_imports_no_plugin_that_is_heavy_and_none_that_is_off(fakes: Fakes) -> None:
    for i in range(20):
        fakes.add(f"slow{i}", "import time\ntime.sleep(1)\nimport torch\n" + good(f"slow{i}"))
    off = ",".join(f"slow{i}" for i in range(10))
    tail = (
        f"; import json; print(json.dumps([m for m in sys.modules if m.startswith('fake_') or m in {HEAVY}]))"
    )
    programs = {
        "import": "import sys, nvdd_core" + tail,
        "list": "import sys; from nvdd_core.cli.main import main; main(['plugins'])" + tail,
        "help": "import sys; from nvdd_core.cli.main import main; main(['--help'])" + tail,
    }
    for program in programs.values():
        started = time.perf_counter()
        done = fakes.python(program, NVDD_DISABLE_PLUGINS=off)
        assert time.perf_counter() - started < 15.0  # twenty sleeps of 1 s, had they been imported
        assert json.loads(done.stdout.splitlines()[-1]) == [], done.stdout
    rows = fakes.listing(NVDD_DISABLE_PLUGINS=off)
    assert [rows["slow3"]["status"], rows["slow13"]["status"]] == ["disabled", "ok"]
    assert "it imports torch (fake_slow13.py:3)" in rows["slow13"]["reason"]


def test_using_one_imports_that_one(fakes: Fakes) -> None:
    for i in range(4):
        fakes.add(f"slow{i}", "import time\ntime.sleep(0.1)\nimport ase\n" + good(f"slow{i}"))
    done = fakes.python(
        "import sys; from nvdd_core.plugins import default_manager as m; m().loader('slow2')\n"
        "print([x for x in sys.modules if x.startswith('fake_')])"
    )
    assert done.stdout.strip() == "['fake_slow2']"


def test_twenty_plugins_of_which_five_are_broken(fakes: Fakes) -> None:
    fakes.add_broken()
    for i in range(15):
        fakes.add(f"fine{i}", good(f"fine{i}"))
    program = (
        "import sys; from nvdd_core.cli.main import main; code = main(['plugins'])\n"
        f"print([m for m in {HEAVY} if m in sys.modules], code)"
    )
    best = 9.9
    for _ in range(5):
        started = processor_time()
        done = fakes.python(program)
        best = min(best, processor_time() - started)
        assert done.stdout.splitlines()[-1] == "[] 0"
    assert best < 0.4


def test_listing_survives_poisoned_heavy_modules(fakes: Fakes) -> None:
    for name in ("torch", "numpy", "ase", "warp", "pydantic"):
        (fakes.root / "site" / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    assert fakes.listing()["lj"]["status"] == "ok"
    assert fakes.nvdd("models").returncode == 0
    assert fakes.nvdd("--version").returncode == 0


# -- O-48 and O-49 --


def test_refusals_are_the_same_under_optimisation(fakes: Fakes) -> None:
    fakes.add_broken()
    fakes.add("old", good("old"), requires=("nvdd-core<0.0.1",))
    fakes.add("new", good("new", api=999))
    fakes.add("garbage", good("garbage", api="'one'"))
    fakes.add("zero", good("zero", api=0))
    fakes.add("none", good("none").replace("nvdd_plugin_info", "unrelated"))
    plain, *optimised = (fakes.python(REFUSALS, flags=flags) for flags in ((), ("-O",), ("-OO",)))
    assert plain.stdout.count("PluginUnusableError") == 10, plain.stdout + plain.stderr
    assert plain.stdout.count("PluginNotFoundError") == 1
    assert plain.stdout.count("PluginValidationError") == 2
    for done in optimised:
        assert done.stdout == plain.stdout


# -- O-50 --


def test_plugin_that_ends_the_process_can_be_kept_out(fakes: Fakes) -> None:
    fakes.add("killer", "import os\nos._exit(3)")
    fakes.add("good", good("good"))
    assert fakes.nvdd("plugins").returncode == 3
    for switch in ({"NVDD_PLUGINS": ""}, {"NVDD_PLUGINS": "good"}, {"NVDD_DISABLE_PLUGINS": "killer"}):
        done = fakes.nvdd("plugins", **switch)
        assert done.returncode == 0
    done = fakes.python(
        "from nvdd_core.plugins import default_manager as m; print(m().model('good').name)",
        NVDD_PLUGINS="good",
    )
    assert done.stdout == "good\n"
    done = fakes.python(
        "import subprocess, sys\nfrom nvdd_core.plugins import PluginManager\n"
        "print(PluginManager(deny=['killer']).model('good').name)"
    )
    assert done.stdout == "good\n"
    child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {CLI!r}, 'plugins']).returncode)"
    assert fakes.python(child, NVDD_DISABLE_PLUGINS="killer").returncode == 0


def test_prints_at_import_do_not_spoil_json(fakes: Fakes) -> None:
    fakes.add("chatty", "print('hello')\n" + IMPORTS + INFO.format(api=1))
    assert fakes.listing()["chatty"]["status"] == "ok"


@pytest.mark.distributed
def test_workers_of_torchrun_find_the_plugin_once(fakes: Fakes) -> None:
    fakes.add("fake", good("fake") + COUNTED)
    (fakes.root / "main.py").write_text(ASK + "ask(0)\n")
    count = fakes.root / "count"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "main.py"],
        env=fakes.env(COUNT=str(count), OMP_NUM_THREADS="1"),
        cwd=fakes.root, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("got fake") == 2
    assert len(set(count.read_text().split())) == len(count.read_text().split()) == 2
