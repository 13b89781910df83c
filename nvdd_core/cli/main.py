"""The command `nvdd`: a group whose subcommands are imported only when they are invoked.

Key objects: `cli` (the click group), `main` (the console script: errors become one line on standard
error and an exit code). Invariant: ``nvdd --help`` and listings import neither torch nor numpy; a
command's module is named in `COMMANDS` and nowhere else. Layer: cli.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Final

import click

from nvdd_core import __version__
from nvdd_core.cli.streams import ensure_streams
from nvdd_core.errors import NvddError

# Name -> (where the command is, its line in the help); the line is here so that help imports nothing.
COMMANDS: Final = {
    "run": ("nvdd_core.cli.run_cmd:run", "Molecular dynamics of a structure file."),
    "evaluate": ("nvdd_core.cli.evaluate_cmd:evaluate", "Energy, forces and stress of a structure file."),
    "validate": ("nvdd_core.cli.validate_cmd:validate", "Compare ranks with one process; say what is wrong."),
    "models": ("nvdd_core.cli.models_cmd:models", "List the models that can be run."),
    "plugins": ("nvdd_core.cli.plugins_cmd:plugins", "List, show and check installed plugins."),
    "adapters": ("nvdd_core.cli.adapters_cmd:adapters", "List adapters and try them."),
    "new-plugin": ("nvdd_core.cli.new_plugin_cmd:new_plugin", "Start a plugin of your own."),
}
_INTERRUPTED: Final = 130  # what shells report for a process ended by an interrupt


@dataclass
class CliState:
    """What `main` has to know of a command line when the command is over."""

    debug: bool = False


def _note_debug(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Remember ``--debug`` where `main` finds it, and hand it on to the command."""
    if value:
        ctx.ensure_object(CliState).debug = True
    return value


def _with_debug(command: click.Command) -> click.Command:
    """See to it that a command and its subcommands take ``--debug`` and tell `main` of it."""
    flag = next((param for param in command.params if param.name == "debug"), None)
    if flag is None:
        flag = click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks.")
        command.params.append(flag)
    # Before anything that can fail, so that the failure is shown as asked.
    flag.is_eager = True
    flag.callback = _note_debug
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _with_debug(inner)
    return command


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = resolve_name(COMMANDS[cmd_name][0])
        if not isinstance(command, click.Command):
            raise NvddError(f"{COMMANDS[cmd_name][0]} is no command but {command!r}")
        return _with_debug(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a slip of the pen gets a suggestion without importing any command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from difflib import get_close_matches  # only for the message

            near = get_close_matches(name, list(COMMANDS), n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{name}'.{hint} Commands: {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help's list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    "nvdd",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="NVDD_PLUGINS, NVDD_DISABLE_PLUGINS and NVDD_STRICT_PLUGINS choose among installed plugins.",
)
@click.version_option(__version__, prog_name="nvdd", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, callback=_note_debug, help="Show tracebacks.")
def cli() -> None:
    """Run interatomic potentials spread over many GPUs or CPU processes."""


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line.

    Parameters
    ----------
    args
        Arguments after the program's name; default those of the process.

    Returns
    -------
    int
        0; 2 for input that can't be used; 1 for any other failure; 130 when interrupted.
    """
    state = CliState()
    ensure_streams()
    try:
        # The type says sequence, click wants a list of its own.
        result: Any = cli.main(
            args=None if args is None else list(args), prog_name="nvdd", standalone_mode=False, obj=state
        )
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", _INTERRUPTED, state)
    except BrokenPipeError:
        # The reader, for instance `head`, has seen enough; keep the interpreter from complaining at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except NvddError as error:
        return _fail(str(error), error.exit_code, state)
    except Exception as error:
        hint = "" if state.debug else " (--debug shows the traceback)"
        return _fail(f"{type(error).__name__}: {error}{hint}", 1, state)
    # Without standalone mode click returns the code of `ctx.exit` instead of raising it.
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int, state: CliState) -> int:
    """Write one line for people, and the traceback for whoever asked for it."""
    if state.debug:
        import traceback  # only for the rare failure

        traceback.print_exc()
    line = " ".join(message.split())
    click.echo(f"nvdd: error: {line}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
