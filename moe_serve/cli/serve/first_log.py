"""The log of a server before its configuration is known: JSON, where that much can be told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_serve.config.logs import set_up_logs
from moe_serve.config.sections import LogConfig
from moe_serve.config.sources import wants_json_log


def begin_log(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> None:
    """So that a refused configuration is an object too. Text needs no log for that."""
    if wants_json_log(flags=flags, environ=environ, file=file):
        set_up_logs(LogConfig(format="json"))
