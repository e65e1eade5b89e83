"""The log of a server before its configuration is known: JSON, where that much can be told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_serve.config import LogConfig
from moe_serve.config_sources import wants_json_log
from moe_serve.logs import set_up_logs


def begin_log(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> None:
    """So that a refused configuration is an object too. Text needs no log for that."""
    if wants_json_log(flags=flags, environ=environ, file=file):
        set_up_logs(LogConfig(format="json"))
