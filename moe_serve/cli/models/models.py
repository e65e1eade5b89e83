"""`moe-serve models`: lists, downloads and removes models in the shared cache."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from moe_serve.cli.console import counted, wide_console
from moe_serve.cli.options import REQUIRED, argument, option, with_options

if TYPE_CHECKING:
    from moe_serve.model.hub.cached_models import CachedModel
    from moe_serve.model.hub.hub_settings import HubSettings

_SHORT_COMMIT = 12
_NAME_HELP = "Name of a model on the hub: OWNER/NAME or OWNER/NAME@REVISION."

models = typer.Typer(
    invoke_without_command=True,
    help="List, download or remove models in the cache that all Hugging Face tools share.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions:
    """Options of `models`."""

    as_json: bool = option(False, "--json", help="Print the result as JSON, for scripts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOptions:
    """Options of `models pull` and `models remove`."""

    name: str = argument(REQUIRED, metavar="NAME", help=_NAME_HELP)
    as_json: bool = option(False, "--json", help="Print the result as JSON, for scripts.")


@models.callback()
@with_options(ListOptions)
def list_models(context: typer.Context, options: ListOptions) -> None:
    """List, download or remove models in the cache that all Hugging Face tools share.

    Without a command, the models in the cache are listed: their commit, size and last use, and
    whether they can be served. HF_HOME or HF_HUB_CACHE choose the folder of the cache.
    """
    if context.invoked_subcommand is not None:
        return

    # Imported late, as they are slow: `--help` must answer at once.
    from moe_serve.model.hub.cached_models import cached_models
    from moe_serve.model.hub.hub_settings import hub_settings
    from moe_serve.model.hub.named_model import served_family

    settings = hub_settings()
    found = cached_models(settings, served_family)
    if options.as_json:
        document = {"cache": str(settings.cache), "models": [asdict(model) for model in found]}
        typer.echo(json.dumps(document, indent=2))
    else:
        _print(found, settings)


@models.command()
@with_options(NamedOptions)
def pull(options: NamedOptions) -> None:
    """Download a model into the shared cache without serving it.

    An interrupted download continues where it ended. HF_ENDPOINT chooses another hub, and HF_TOKEN
    gives the token for a gated or private model.
    """
    from moe_serve.model.hub.hub_name import parse_hub_name, snapshot_name
    from moe_serve.model.hub.hub_settings import hub_settings
    from moe_serve.model.hub.named_model import fetch_shown

    folder = fetch_shown(parse_hub_name(options.name), hub_settings())
    found = snapshot_name(folder)
    assert found is not None, "a fetched model is a snapshot of the cache"
    if options.as_json:
        document = {"name": found.repo, "commit": found.revision, "folder": str(folder)}
        typer.echo(json.dumps(document, indent=2))
    else:
        typer.echo(f"{found} is in {folder}")


@models.command()
@with_options(NamedOptions)
def remove(options: NamedOptions) -> None:
    """Remove a model from the shared cache.

    With a revision (a branch, a tag, a commit or the beginning of one), only that
    revision is removed.
    """
    from moe_serve.model.hub.cached_models import remove_model
    from moe_serve.model.hub.fetch import shown_bytes
    from moe_serve.model.hub.hub_name import parse_hub_name
    from moe_serve.model.hub.hub_settings import hub_settings

    name = parse_hub_name(options.name)
    done = remove_model(hub_settings(), name, has_revision="@" in options.name)
    if options.as_json:
        typer.echo(json.dumps(asdict(done), indent=2))
        return
    commits = ", ".join(commit[:_SHORT_COMMIT] for commit in done.commits)
    typer.echo(
        f"{done.name}: {counted(len(done.commits), 'revision')} removed ({commits}), "
        f"{shown_bytes(done.num_bytes)} freed"
    )


def _print(found: tuple[CachedModel, ...], settings: HubSettings) -> None:
    from moe_serve.model.hub.fetch import shown_bytes

    if not found:
        typer.echo(f"no models in {settings.cache}: fetch one with `moe-serve models pull NAME`")
        return
    table = Table("model", "revision", "commit", "size", "last used", "family", "state", box=None)
    table.columns[3].justify = "right"
    for model in found:
        table.add_row(
            model.name,
            ", ".join(model.revisions),
            model.commit[:_SHORT_COMMIT],
            shown_bytes(model.num_bytes),
            model.last_used[:16].replace("T", " "),
            model.family or "",
            model.problem or "complete",
        )
    console = wide_console()
    console.print(table)
    console.print(f"{counted(len(found), 'model')} in {settings.cache}")
