"""The command `nvdd models`: what can be given to ``--model``. Layer: cli."""

from __future__ import annotations

import click

from nvdd_core.cli.plugins_cmd import emit, json_flag, listing
from nvdd_core.plugins import report
from nvdd_core.plugins.known import not_installed


@click.command("models", short_help="List the models that can be run.")
@json_flag
def models(as_json: bool) -> None:
    """List the models of installed plugins.

    Only the plugins' own light modules are imported, neither torch nor the models.
    """
    with listing(as_json) as manager:
        document = report.models_document(manager)
    emit(document, as_json, report.models_table(document), document["notes"])
    sentences = not_installed(row["name"] for row in document["not_installed"])
    if not as_json and sentences:
        click.echo("\n" + "\n".join(sentences))
    manager.require_healthy()
