"""One line for each HTTP request: never a header, a body or what follows a path's question mark."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_serve.config.logs import ACCESS_LOG

_LOGGER = logging.getLogger(ACCESS_LOG)
_MAX_PATH_CHARS = 200


class AccessLog:
    """`exclude`: beginnings of paths that get no line, as probes come every few seconds."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self._exclude = tuple(exclude)

    def note(
        self, method: str, path: str, status: int | None, seconds: float, request_id: str
    ) -> None:
        """`status` None: the client went away before an answer."""
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
