"""Finds the folder of the checkpoint that a configuration serves: a name on a hub is fetched, and
an adapter is merged into the model for a server of this fine-tune alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from moe_serve.adapters.merged_folder import merged_folder
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.opened_model import model_folder
from moe_serve.model.hub.fetch import ShowBytes
from moe_serve.model.hub.named_model import local_engine_config

_log = logging.getLogger(__name__)


def served_engine_config(
    config: EngineConfig,
    *,
    check: Callable[[EngineConfig], None] | None = None,
    is_quiet: bool = False,
    note: ShowBytes | None = None,
) -> EngineConfig:
    """Returns the configuration with the folder that is served. See `local_engine_config`; raises
    CheckpointError for an adapter that cannot be merged."""
    config = local_engine_config(config, check=check, is_quiet=is_quiet, note=note)
    adapter = config.model.merge_adapter
    if adapter is None:
        return config
    base, path = model_folder(config.model), Path(adapter).expanduser()
    folder = merged_folder(base, path, config.model.max_merged_models)
    _log.info("%s is merged into the model, in %s", adapter, folder)
    return replace(config, model=replace(config.model, path=str(folder), merge_adapter=None))
