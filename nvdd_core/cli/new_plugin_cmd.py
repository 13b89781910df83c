"""The command `nvdd new-plugin`: a plugin of one's own from the template.

Key objects: `new_plugin` (the click command), `template_folder`. Invariant: everything is checked before a file
is written, and nothing that exists is changed. Layer: cli.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

import click

import nvdd_core
from nvdd_core.cli.plugins_cmd import emit, json_flag, listing
from nvdd_core.errors import InputError, NvddError
from nvdd_core.plugins import PluginManager, report
from nvdd_core.plugins.known import KNOWN_MODELS
from nvdd_core.plugins.loading import CORE_SPECS
from nvdd_core.plugins.requirements import normalized

# A plugin's name that is part of a distribution's and a package's name: single underscores, none at the end.
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST: Final = 32
_AUTHOR: Final = re.compile(r"(?P<name>[^<>,]*?)\s*(<(?P<email>[^<>\s@]+@[^<>\s@]+)>)?")
_INSTALL: Final = "pip install 'nvdd-core[author]'"


@click.command("new-plugin", short_help="Start a plugin of your own.")
@click.argument("name")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the project, new or empty.  [default: nvdd-NAME]",
)
@click.option("--title", metavar="TEXT", help="A few words on the model.  [default: from NAME]")
@click.option("--author", metavar="TEXT", default="", help="Who writes it, as in 'Ada <ada@example.org>'.")
@json_flag
def new_plugin(name: str, output: Path | None, title: str | None, author: str, as_json: bool) -> None:
    """Write the project of a plugin NAME: eight files with a small model that works, and its tests.

    NAME is lower case letters, digits and underscores; the model gets it, too. Change the model in
    src/nvdd_NAME/model.py into yours, and keep the tests passing. Needs copier, which
    pip install 'nvdd-core[author]' brings.
    """
    with listing(as_json) as manager:
        _check_name(name, manager)
    distribution = f"nvdd-{name.replace('_', '-')}"
    title = name.replace("_", " ").capitalize() if title is None else title.strip()
    _check_text("--title", title, longest=60)
    if not title:
        raise InputError("--title is empty; give a few words on the model, or leave it out")
    folder = Path(distribution) if output is None else output
    _check_folder(folder)
    _render(folder, {"name": name, "title": title, **_author(author)})
    written = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    steps = [
        f"pip install -e {shlex.quote(f'{folder}[test]')}",
        f"pytest {shlex.quote(str(folder))}",
        f"nvdd evaluate structure.xyz --model {name} --ranks 2",
    ]
    document = {
        "schema": report.SCHEMA,
        "core": report.core_block(),
        "plugin": {"name": name, "distribution": distribution, "package": f"nvdd_{name}", "title": title},
        "folder": str(folder),
        "files": written,
        "next": steps,
    }
    files = "\n".join(f"  {folder / file}" for file in written)
    commands = "\n".join(f"  {step}" for step in steps)
    emit(document, as_json, f"plugin '{name}' is written:\n{files}\n\nnext:\n{commands}")


def template_folder() -> Path:
    """Return the template: in an installed package beside its modules, in a checkout in ``templates``.

    Raises
    ------
    NvddError
        When it is in neither place.
    """
    package = Path(nvdd_core.__file__).parent
    places = (package / "_template", package.parent / "templates" / "plugin")
    for place in places:
        if (place / "copier.yml").is_file():
            return place
    raise NvddError(
        f"the template of a plugin is neither in {places[0]} nor in {places[1]}; install nvdd-core again"
    )


def _check_name(name: str, manager: PluginManager) -> None:
    """Refuse a name that is malformed or somebody's."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise InputError(
            f"a plugin can't be named '{name}': expected lower case letters, digits and single underscores, "
            f"a letter first, {_LONGEST} characters at most, as in 'my_model'"
        )
    distribution = normalized(f"nvdd-{name}")
    ours = {"nvdd-core", *KNOWN_MODELS.values()}
    if name in KNOWN_MODELS or distribution in ours or f"SPEC_{name.upper()}_HALO" in CORE_SPECS:
        raise InputError(f"the name '{name}' belongs to nvdd itself; choose another one")
    for record in manager.records(load_plugins=False):
        if record.name == name or normalized(record.entry.distribution) == distribution:
            raise InputError(f"{record.entry.label} is installed already; choose another name")
    for model in manager.models():
        if model.decl.name == name:
            raise InputError(
                f"plugin '{model.plugin}' ({model.distribution}) has a model named '{name}'; choose another name"
            )


def _check_text(option: str, text: str, longest: int) -> None:
    """Refuse what can't stand between quotes in every generated file."""
    if any(c in '"\\' or not c.isprintable() for c in text):
        raise InputError(f"{option} {text!r}: it may hold neither double quotes, backslashes nor line breaks")
    if len(text) > longest:
        raise InputError(f"{option} has {len(text)} characters; {longest} at most")


def _author(text: str) -> dict[str, str]:
    """Split ``"Name <mail>"`` into what the template asks for."""
    _check_text("--author", text, longest=80)
    parts = _AUTHOR.fullmatch(text.strip())
    if parts is None:
        raise InputError(f"--author {text!r}: expected a name, as in 'Ada', or 'Ada <ada@example.org>'")
    return {"author": parts["name"], "email": parts["email"] or ""}


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder; choose another one with --output")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"the folder {folder} is not empty; choose another one with --output")


def _render(folder: Path, answers: dict[str, str]) -> None:
    try:
        import copier  # an optional dependency, and 0.3 s
    except ImportError as error:
        raise InputError(f"nvdd new-plugin needs copier ({error}); install it: {_INSTALL}") from error

    try:
        folder.mkdir(parents=True, exist_ok=True)
        copier.run_copy(str(template_folder()), folder, data=answers, defaults=True, quiet=True)
    except OSError as error:
        raise InputError(f"the folder {folder} can't be written to: {error}") from error
