"""Computes the placement version that traces and predictors record: a hash of the placement
file."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from moe_serve.config.sections import ClusterConfig
from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file

_NUM_DIGITS = 16


def placement_version(cluster: ClusterConfig) -> str:
    """Returns the hash of the placement file; empty without a file. Raises ConfigError if it cannot
    be read."""
    if cluster.placement is None:
        return ""
    try:
        content = regular_file(Path(cluster.placement).expanduser()).read_bytes()
    except OSError as error:
        raise ConfigError(f"{cluster.placement} cannot be read: {error.strerror}.") from None
    return sha256(content).hexdigest()[:_NUM_DIGITS]
