"""Sets up the log on standard error: lines of text, or one JSON object per line.

A record made while a request is served carries that request's id.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import threading
from datetime import datetime, timezone
from types import TracebackType
from typing import Any, TextIO

from moe_serve.config.sections import LogConfig
from moe_serve.errors import printable

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
ACCESS_LOG = "moe_serve.http.access"
STARTUP_LOG = "moe_serve.startup"
RANK_LOG = "moe_serve.ranks"  # what ranks write, with the rank's name before it
_TOLD = (
    STARTUP_LOG,
    RANK_LOG,
    "moe_serve.cluster.autoscale",
    "moe_serve.cluster.cells",
    "moe_serve.cluster.members.rank_starter",
    "moe_serve.cluster.rebalance",
    "moe_kernels.build",
)  # always from INFO

_log = logging.getLogger("moe_serve")
current_request: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, even if it was replaced after the log was set up."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up_logs(config: LogConfig) -> None:
    """Sets up the log of the whole process, replacing an earlier setup. The access log has its own
    switch."""
    handler, root = StderrHandler(), logging.getLogger()
    is_json = config.format == "json"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(TEXT_FORMAT))
    root.handlers = [h for h in root.handlers if not isinstance(h, StderrHandler)] + [handler]
    root.setLevel(config.level.upper())
    for name in _TOLD:
        logging.getLogger(name).setLevel(min(logging.INFO, logging.getLogger().level))
    logging.getLogger(ACCESS_LOG).setLevel(logging.INFO if config.access else logging.CRITICAL)
    if config.level == "debug":  # a line for each event of each socket
        logging.getLogger("asyncio").setLevel(logging.INFO)
    logging.captureWarnings(is_json)
    if is_json:  # Python itself would write these as text
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
        sys.unraisablehook = _log_unraisable


def is_json_log() -> bool:
    """Returns whether the log is JSON, so that other output should go into it too."""
    return any(isinstance(h.formatter, JsonFormatter) for h in logging.getLogger().handlers)


class TextFormatter(logging.Formatter):
    """Formats a record as one line, followed by the lines of an exception. Escapes control
    characters, so that no message can steer a terminal or imitate a second record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        record.message = printable(record.message, keeps_lines=False)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei))


class JsonFormatter(logging.Formatter):
    """Formats time, level, logger and message, and if present request_id, exception and the fields
    of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage()),
        }
        if request_id := current_request.get():
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = printable(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False, default=str)


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    _log.critical("uncaught: %r", error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    error, name = uncaught.exc_value, uncaught.thread.name if uncaught.thread else "?"
    if error is not None:  # None: SystemExit, which ends a thread only
        _log.critical("uncaught in thread %s: %r", name, error, exc_info=error)


def _log_unraisable(ignored: sys.UnraisableHookArgs) -> None:
    where = ignored.err_msg or "exception ignored in"
    _log.error("%s %r: %r", where, ignored.object, ignored.exc_value, exc_info=ignored.exc_value)
