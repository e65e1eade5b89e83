"""Turns the model of a configuration into a folder: downloads a model given by name, and leaves a
folder as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from moe_serve.config.sections import EngineConfig
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families import family_of
from moe_serve.model.formats import format_of
from moe_serve.model.hub.fetch import CheckConfig, ShowBytes, cached_model, fetch_model
from moe_serve.model.hub.hub_name import HubName, hub_name_of
from moe_serve.model.hub.hub_settings import HubSettings, hub_settings


def local_model(model: str | None, *, is_quiet: bool = False) -> str | None:
    """Returns the folder of a model, after fetching it if the argument is a name on the hub. Raises
    HubError.

    A bar is shown on a terminal unless `is_quiet`. The network is not used if the argument is a
    folder or None.
    """
    name = hub_name_of(model)
    return model if name is None else str(fetch_shown(name, hub_settings(), is_quiet))


def local_engine_config(
    config: EngineConfig,
    *,
    check: Callable[[EngineConfig], None] | None = None,
    is_quiet: bool = False,
    note: ShowBytes | None = None,
) -> EngineConfig:
    """Returns the configuration with the folder of its model, as `local_model` finds it.

    `check` is called with it once the folder has a config.json, before any weights are fetched.
    `note` is called with the bytes received so far, and those in all.
    """
    name = hub_name_of(config.model.path)
    if name is None:
        return config

    def at(folder: Path) -> EngineConfig:
        return replace(config, model=replace(config.model, path=str(folder)))

    def check_folder(folder: Path) -> None:
        check_served(folder)
        if check is not None:
            check(at(folder))

    return at(fetch_shown(name, hub_settings(), is_quiet, note, check_folder))


def cached_engine_config(config: EngineConfig) -> EngineConfig:
    """Returns the configuration with the folder of its model. A name must be in the cache: the
    network is not used. Raises HubError."""
    name = hub_name_of(config.model.path)
    if name is None:
        return config
    folder = str(cached_model(name, hub_settings()))
    return replace(config, model=replace(config.model, path=folder))


def served_family(folder: Path) -> str:
    """Returns the family that serves the config.json of a folder; CheckpointError if there is none,
    or if it has settings or a format of weights that are not served."""
    config = HFConfig.read(folder)
    family = family_of(config).read_spec(config.text()).family
    format_of(config)
    return family


def check_served(folder: Path) -> None:
    served_family(folder)


def fetch_shown(
    name: HubName,
    settings: HubSettings,
    is_quiet: bool = False,
    note: ShowBytes | None = None,
    check: CheckConfig = check_served,
) -> Path:
    """Fetches a model with a bar on the terminal. Raises HubError."""
    with _download_bar(Console(stderr=True, quiet=is_quiet), str(name)) as show:
        return fetch_model(name, settings, check, _both(show, note))


def _both(one: ShowBytes | None, other: ShowBytes | None) -> ShowBytes | None:
    callbacks: list[Callable[[int, int], None]] = [each for each in (one, other) if each]
    if not callbacks:
        return None

    def show(done: int, total: int) -> None:
        for callback in callbacks:
            callback(done, total)

    return show


@contextlib.contextmanager
def _download_bar(console: Console, name: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback (bytes received, bytes in all) that draws a bar; None without a
    terminal."""
    if not console.is_terminal or console.quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"downloading {name}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
