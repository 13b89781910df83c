"""`nvdd new-plugin`: what it writes is installed, listed and tested as a stranger would."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nvdd_core.cli.main import main
from nvdd_core.cli.new_plugin_cmd import template_folder
from nvdd_core.errors import NvddError
from tests.plugins._fake import Fakes, good

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "README.md",
    "pyproject.toml",
    "src/nvdd_soft_ball/__init__.py",
    "src/nvdd_soft_ball/_plugin.py",
    "src/nvdd_soft_ball/model.py",
    "src/nvdd_soft_ball/py.typed",
    "src/nvdd_soft_ball/spec.py",
    "tests/test_conformance.py",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plugin made in an empty folder."""
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "soft_ball", "--author", "Zo\u00eb O'Neil <z@example.org>"]) == 0
    capsys.readouterr()
    return tmp_path / "nvdd-soft-ball"


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    (tmp_path / "site").mkdir()
    return Fakes(tmp_path)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def run(*command: object, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the project installed in ``folder / "site"``, where it has been."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVDD_")}
    kept |= {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=kept,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


# -- what is written --


def test_files(project: Path) -> None:
    assert files(project) == FILES
    values = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    assert values["project"]["name"] == "nvdd-soft-ball"
    assert values["project"]["authors"] == [{"name": "Zo\u00eb O'Neil", "email": "z@example.org"}]
    assert "nvdd-core>=0.1,<0.2" in values["project"]["dependencies"]
    assert values["project"]["entry-points"]["nvdd.plugins"] == {"soft_ball": "nvdd_soft_ball._plugin"}
    for path in project.rglob("*"):
        if path.is_file():
            assert "{" + "{" not in path.read_text(encoding="utf-8"), path


def test_json_and_the_three_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    title = "It's {{ 7 * 6 }}"
    assert main(["new-plugin", "soft_ball", "--output", "a b", "--title", title, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert document["plugin"] == {
        "name": "soft_ball",
        "distribution": "nvdd-soft-ball",
        "package": "nvdd_soft_ball",
        "title": title,
    }
    assert set(document["files"]) == FILES == files(tmp_path / "a b")
    assert document["next"] == [
        "pip install -e 'a b[test]'",
        "pytest 'a b'",
        "nvdd evaluate structure.xyz --model soft_ball --ranks 2",
    ]
    assert title in (tmp_path / "a b" / "src" / "nvdd_soft_ball" / "_plugin.py").read_text(encoding="utf-8")
    values = tomllib.loads((tmp_path / "a b" / "pyproject.toml").read_text(encoding="utf-8"))
    assert values["project"]["description"] == f"{title}: a model for nvdd"
    assert "authors" not in values["project"]


@pytest.mark.parametrize("name", ["x", "a" * 15, "a" * 32])
def test_linters_have_nothing_to_say(name: str, tmp_path: Path) -> None:
    """Whatever the name's length; with the settings of this project and with those that are generated."""
    assert main(["new-plugin", name, "--output", str(tmp_path / "p")]) == 0
    ruff = [sys.executable, "-m", "ruff"]
    for how in (["--config", ROOT / "pyproject.toml"], []):
        for command in (["check"], ["format", "--check"]):
            done = subprocess.run(
                [*ruff, *command, "--no-cache", *how, tmp_path / "p"],
                cwd=ROOT if how else tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout


def test_no_git_is_needed(tmp_path: Path) -> None:
    done = run(
        sys.executable, "-m", "nvdd_core.cli.main", "new-plugin", "soft_ball", folder=tmp_path, PATH=""
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "nvdd-soft-ball") == FILES


def test_template_is_found_in_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nvdd_core"
    (package / "_template").mkdir(parents=True)
    monkeypatch.setattr("nvdd_core.__file__", str(package / "__init__.py"))
    with pytest.raises(NvddError, match=r"is neither in .*_template nor in"):
        template_folder()
    (package / "_template" / "copier.yml").touch()
    assert template_folder() == package / "_template"


# -- what it is good for --


@pytest.mark.timeout(600)
def test_it_installs_lists_and_passes_its_own_tests(project: Path) -> None:
    folder = project.parent
    options = ["--no-build-isolation", "--no-deps", "--disable-pip-version-check", "--quiet"]
    # into a folder of its own, so that the environment of these tests stays as it is
    done = run(sys.executable, "-m", "pip", "install", *options, "--target", "site", project, folder=folder)
    assert done.returncode == 0, done.stderr
    nvdd = [sys.executable, "-m", "nvdd_core.cli.main"]
    listed = run(*nvdd, "plugins", "--json", folder=folder)
    row = next(row for row in json.loads(listed.stdout)["plugins"] if row["name"] == "soft_ball")
    assert (row["status"], row["distribution"], row["title"]) == ("ok", "nvdd-soft-ball", "Soft ball")
    assert [model["name"] for model in row["models"]] == ["soft_ball"]
    checked = run(*nvdd, "plugins", "check", "soft_ball", folder=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tests = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", project, folder=folder)
    assert tests.returncode == 0, tests.stdout[-4000:] + tests.stderr[-2000:]
    again = run(*nvdd, "new-plugin", "soft_ball", "--output", "other", folder=folder)
    assert again.returncode == 2
    assert "plugin 'soft_ball' (nvdd-soft-ball 0.1.0) is installed already" in again.stderr


def test_it_can_be_installed_editable(project: Path) -> None:
    """Its build backend is asked for what pip would ask."""
    folder = project.parent
    code = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    done = run(sys.executable, "-c", code, folder / "wheels", folder=project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nvdd_soft_ball-0.1.0-py3-none-any.whl"


def test_its_light_module_is_light(project: Path) -> None:
    tree = ast.parse((project / "src" / "nvdd_soft_ball" / "_plugin.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"__future__", "collections.abc", "nvdd_core.plugins"}


# -- what is refused --


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["Soft"], "lower case letters"),
        (["1soft"], "lower case letters"),
        (["soft-ball"], "lower case letters"),
        (["soft_"], "single underscores"),
        (["so__ft"], "single underscores"),
        (["a" * 33], "32 characters"),
        (["mace"], "belongs to nvdd itself"),
        (["dftd3"], "belongs to nvdd itself"),
        (["core"], "belongs to nvdd itself"),
        (["mpnn"], "belongs to nvdd itself"),
        (["soft", "--title", 'a "title"'], "--title"),
        (["soft", "--title", "two\nlines"], "--title"),
        (["soft", "--title", "  "], "--title is empty"),
        (["soft", "--title", "x" * 61], "60 at most"),
        (["soft", "--author", "A, B"], "--author"),
        (["soft", "--author", "A <not a mail>"], "--author"),
        (["soft", "--output", "full"], "the folder full is not empty"),
        (["soft", "--output", "full/file"], "is not a folder"),
    ],
)
def test_refusals(
    args: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(["new-plugin", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nvdd: error: ")
    assert said in err
    assert files(tmp_path) == {"full/file"}


def test_names_of_others_are_refused(fakes: Fakes) -> None:
    fakes.add("mine", good("other"), dist="nvdd-some-thing")
    fakes.add("bad", "raise ImportError")
    for name, said in (
        ("mine", "plugin 'mine' (nvdd-some-thing 1.0) is installed already"),
        ("some_thing", "plugin 'mine' (nvdd-some-thing 1.0) is installed already"),
        ("bad", "plugin 'bad' (fake-bad 1.0) is installed already"),
        ("other", "plugin 'mine' (nvdd-some-thing) has a model named 'other'"),
    ):
        done = fakes.nvdd("new-plugin", name)
        assert done.returncode == 2
        assert said in done.stderr
        assert not list(fakes.root.glob("nvdd-*"))


def test_without_copier(fakes: Fakes) -> None:
    (fakes.root / "site" / "copier.py").write_text("raise ModuleNotFoundError(\"No module named 'copier'\")")
    done = fakes.nvdd("new-plugin", "soft")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "nvdd: error: nvdd new-plugin needs copier (No module named 'copier'); "
        "install it: pip install 'nvdd-core[author]'\n"
    )
    assert not (fakes.root / "nvdd-soft").exists()


def test_a_plugin_that_prints_does_not_spoil_json(fakes: Fakes) -> None:
    noise = "import os\nprint('noise')\nos.write(1, b'more noise')\n"
    fakes.add("loud", noise + good("loud"))
    done = fakes.nvdd("new-plugin", "soft", "--json")
    assert json.loads(done.stdout)["plugin"]["name"] == "soft"


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["new-plugin", "soft", "--output", str(tmp_path / "file" / "inner")]) == 2
    assert "can't be written to" in capsys.readouterr().err
