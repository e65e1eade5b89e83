"""A task that fails, in a module that imports little: each worker process imports it."""

from __future__ import annotations

from moe_serve.errors import ConfigError


def refuse(why: str) -> None:
    """Raises ConfigError."""
    raise ConfigError(why)
