"""`moe-serve cache`: shows, verifies and clears the folder of a disk tier."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.table import Table

from moe_serve.cli.console import wide_console
from moe_serve.cli.options import REQUIRED, argument, option, with_options
from moe_serve.errors import ConfigError

cache = typer.Typer(no_args_is_help=True)

_EXIT_WRONG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderOptions:
    """The folder of a disk tier."""

    folder: Path = argument(REQUIRED, help="Folder that was given to --kv-disk.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReportOptions:
    """Options of `cache stat` and `cache verify`."""

    where: FolderOptions
    as_json: bool = option(False, "--json", help="Print the result as JSON, for scripts.")


@cache.callback()
def _group() -> None:
    """Show, verify or clear the KV pages that a server keeps on a disk."""


@cache.command()
@with_options(CacheReportOptions)
def stat(options: CacheReportOptions) -> None:
    """Show the models whose pages are in the folder, and the space that they take.

    A server may use the folder at the same time.
    """
    _show(options, verifies=False)


@cache.command()
@with_options(CacheReportOptions)
def verify(options: CacheReportOptions) -> None:
    """Read every page and check that its bytes are those that were written.

    The exit code is 1 if a page is damaged. A server never uses a damaged page.
    """
    if num_wrong := _show(options, verifies=True):
        typer.echo(f"{num_wrong} pages are damaged; a server computes these again.", err=True)
        raise typer.Exit(_EXIT_WRONG)


@cache.command()
@with_options(FolderOptions)
def clear(options: FolderOptions) -> None:
    """Remove all pages in the folder. No server may use it at the same time."""
    from moe_serve.cache.tiers.disk_report import clear as clear_folder

    taken = clear_folder(options.folder)
    typer.echo(f"removed {taken / 2**20:.1f} MiB of pages from {options.folder}")


def _show(options: CacheReportOptions, *, verifies: bool) -> int:
    """Prints the report; returns the number of damaged pages."""
    from moe_serve.cache.tiers.disk_report import report

    folder = options.where.folder
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist: give the folder of --kv-disk.")
    found = report(folder, now=time.time(), verifies=verifies)
    if options.as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=2))
    elif not found:
        typer.echo(f"{folder} holds no pages")
    else:
        table = Table(
            "identity", "model", "dtype", "files", "MiB", "pages", "tokens", "encrypted", box=None
        )
        if verifies:
            table.add_column("damaged")
        for each in found:
            size = f"{each.num_bytes / 2**20:.1f}"
            row = [each.name, each.model, each.dtype, each.num_files, size]
            row += [each.num_pages, each.num_tokens, "yes" if each.is_encrypted else "no"]
            row += [each.num_wrong] if verifies else []
            table.add_row(*map(str, row))
        wide_console().print(table)
    return sum(each.num_wrong or 0 for each in found)
