"""Opens the adapters of an engine, or refuses what adapters cannot be combined with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_part import LiveModel
from moe_serve.adapters.registry import AdapterRegistry, open_registry
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import EngineConfig
from moe_serve.errors import ConfigError
from moe_serve.model.load.loader import ModelLoader


def check_adapters(config: EngineConfig) -> None:
    """Raises ConfigError if the configuration asks for adapters in a way that is not served."""
    adapters = config.adapters
    if not adapters.is_enabled:
        unset = AdapterConfig()
        for key in (field.name for field in fields(adapters)):
            if getattr(adapters, key) != getattr(unset, key):
                raise ConfigError(
                    f"adapters.{key} is set, but adapters.is_enabled is false: add --enable-lora "
                    "or leave it out."
                )
        return
    if adapters.root is not None and not Path(adapters.root).expanduser().is_dir():
        raise ConfigError(
            f"adapters.root is {adapters.root!r}, which is not a folder: make it, name the folder "
            "below which adapters lie, or leave it out."
        )
    if config.speculation.method in ("head", "mtp", "self"):
        raise ConfigError(
            f"speculation.method {config.speculation.method!r} drafts with the base model, which "
            "adapters do not change: use 'auto', 'ngram' or 'suffix', or serve without "
            "--enable-lora."
        )


def open_adapters(
    config: EngineConfig, loader: ModelLoader, live: LiveModel
) -> AdapterRegistry | None:
    """Loads the configured adapters; None: the engine serves none. Raises ConfigError, and
    CheckpointError for an adapter that cannot be served."""
    if not config.adapters.is_enabled:
        return None
    builder = AdapterBuilder(loader, config.adapters, live=live)
    registry = open_registry(config.adapters, builder.build)
    builder.rests.begin()
    return registry
