"""O-45: editable installs by pip, in both layouts, are found once, from wherever the command is called."""

from __future__ import annotations

import json
import os
import site
import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.plugins._fake import CLI, good

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "fake-{name}"
version = "1.0"

[project.entry-points."nvdd.plugins"]
{name} = "fake_{name}._plugin"

[tool.setuptools.packages.find]
where = ["{where}"]
"""
LAYOUTS = {"flat": ".", "src": "src"}


class Place:
    """A virtual environment that sees the packages of this one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        venv.create(root / "env", with_pip=False, symlinks=True)
        self.python = root / "env" / "bin" / "python"
        (packages,) = (root / "env" / "lib").glob("python*/site-packages")
        below = [path for path in site.getsitepackages() if Path(path).is_dir()]
        lines = [f"import site; site.addsitedir({path!r})" for path in below]
        (packages / "below.pth").write_text("\n".join(lines) + "\n")

    def project(self, name: str) -> Path:
        """Write the sources of a plugin in the layout of its name."""
        folder = self.root / name
        package = folder / LAYOUTS[name] / f"fake_{name}"
        package.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PROJECT.format(name=name, where=LAYOUTS[name]))
        (package / "__init__.py").write_text("")
        (package / "_plugin.py").write_text(good(name))
        return folder

    def run(self, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the environment's Python."""
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("NVDD_", "PYTHONPATH", "VIRTUAL_ENV"))
        }
        return subprocess.run(
            [self.python, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
        )

    def pip(self, *args: str) -> None:
        """Install without network and without an environment of its own for the build."""
        flags = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
        done = self.run("-m", "pip", "install", *flags, *args, cwd=self.root)
        assert done.returncode == 0, done.stdout + done.stderr

    def listed(self, name: str, cwd: Path) -> list[dict[str, Any]]:
        """The rows of `nvdd plugins` of that name, called in a folder, which is on the path as well."""
        done = self.run("-c", CLI, "plugins", "--json", cwd=cwd)
        assert done.returncode == 0, done.stderr
        return [row for row in json.loads(done.stdout)["plugins"] if row["name"] == name]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    for tool in ("pip", "setuptools"):  # found, not imported: setuptools takes over distutils
        if find_spec(tool) is None:
            pytest.skip(f"needs {tool}")
    made = Place(tmp_path_factory.mktemp("editable"))
    made.pip(*(arg for name in LAYOUTS for arg in ("-e", str(made.project(name)))))
    for name in LAYOUTS:  # older releases of setuptools leave this by themselves
        done = made.run("-c", "import setuptools; setuptools.setup()", "-q", "egg_info", cwd=made.root / name)
        assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_found_once_from_anywhere(place: Place, name: str) -> None:
    folder = place.root / name
    # a second listing, for whoever calls from there
    assert list((folder / LAYOUTS[name]).glob("*.egg-info"))
    for cwd in (
        folder,
        folder / LAYOUTS[name],
        folder / LAYOUTS[name] / f"fake_{name}",
        place.root,
        Path("/"),
    ):
        (row,) = place.listed(name, cwd)
        assert (row["status"], row["version"], row["models"][0]["name"]) == ("ok", "1.0", name), cwd
        program = (
            "from nvdd_core.plugins import default_manager as m; import sys\n"
            f"print(m().model({name!r}).name, len(m().named({name!r})), sys.modules['fake_{name}._plugin'].__file__)"
        )
        done = place.run("-c", program, cwd=cwd)
        where = folder / LAYOUTS[name] / f"fake_{name}" / "_plugin.py"
        assert done.stdout.split()[:2] == [name, "1"], done.stderr
        assert Path(done.stdout.split()[2]).resolve() == where.resolve()
    (row,) = place.listed(name, place.root)
    assert row["editable"] is True


def test_the_same_wheel_on_two_path_entries(place: Place) -> None:
    wheels = place.root / "wheels"
    done = place.run(
        *("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--disable-pip-version-check", "-w", str(wheels), str(place.root / "src")),
        cwd=place.root,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    targets = [place.root / "one", place.root / "two"]
    for target in targets:
        place.pip("--target", str(target), str(wheel))
    program = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); " + CLI
    for first, second in (targets, targets[::-1]):
        done = place.run("-c", program, f"{first}:{second}", "plugins", "--json", cwd=place.root)
        (row,) = [row for row in json.loads(done.stdout)["plugins"] if row["name"] == "src"]
        assert row["location"] == str(first.resolve())
        assert any(str(second.resolve()) in note for note in row["notes"])
        assert row["models"][0]["name"] == "src"


def test_an_uninstalled_plugin_is_gone(place: Place) -> None:
    done = place.run("-m", "pip", "uninstall", "-q", "-y", "fake-flat", cwd=place.root)
    assert done.returncode == 0, done.stderr
    assert place.listed("flat", place.root) == []
