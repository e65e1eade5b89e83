"""Logs one line for each HTTP request, without headers, bodies and query strings."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_serve.config.logs import ACCESS_LOG

_LOGGER = logging.getLogger(ACCESS_LOG)
_MAX_PATH_CHARS = 200


class AccessLog:
    """Writes the access log. Paths that start with an entry of `exclude`, such as probes, get no
    line."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self._exclude = tuple(exclude)

    def note(
        self, method: str, path: str, status: int | None, seconds: float, request_id: str
    ) -> None:
        """Logs one request. `status` None: the client disconnected before an answer."""
        if not _LOGGER.isEnabledFor(logging.INFO) or path.startswith(self._exclude):
            return
        shown = path[:_MAX_PATH_CHARS].encode("unicode_escape").decode()
        fields = {
            "method": method[:20],
            "path": shown,
            "status": status,
            "seconds": round(seconds, 4),
            "request_id": request_id,
        }
        _LOGGER.info(
            "%s %s %s %.4f s %s",
            fields["method"],
            shown,
            "-" if status is None else status,
            seconds,
            request_id,
            extra={"fields": fields},
        )
