"""Sets up a JSON log before the configuration is known, if the log format can be determined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_serve.config.logs import set_up_logs
from moe_serve.config.sections import LogConfig
from moe_serve.config.sources import wants_json_log


def begin_log(
    flags: Mapping[str, object], environ: Mapping[str, str], file: Path | None = None
) -> None:
    """Starts a JSON log, so that a refused configuration is logged as an object too. A text log
    needs no setup for that."""
    if wants_json_log(flags=flags, environ=environ, file=file):
        set_up_logs(LogConfig(format="json"))
