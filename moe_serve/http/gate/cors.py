"""Requests from web pages of other origins (CORS): refused unless origins are configured."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from moe_serve.http.schema.errors import ApiError

_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("X-Request-Id", "X-Ignored-Parameters", "Retry-After", "Retry-After-Ms")


class ConfiguredCors(CORSMiddleware):
    """Handles CORS before the keys: a browser's preflight request has no key. Cookies are not
    allowed."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """A refused preflight gets the same error envelope as other errors."""
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = (
            "This origin, method or header is not allowed. server.cors_origins lists the "
            f"allowed origins; the allowed methods are {', '.join(_METHODS)}."
        )
        return ApiError(403, message, code="cors_refused").response()
