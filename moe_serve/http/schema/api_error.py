"""Turns every error into one envelope: {"error": {"message", "type", "param", "code"}}.

`code` is a string. Under /v1/messages the envelope is Anthropic's:
{"type": "error", "error": {"type", "message", "details"}}.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from moe_serve.errors import (
    CellsError,
    GenerationError,
    InvalidRequestError,
    ModelNotFoundError,
    MoeServeError,
    RebalanceError,
    ServerOverloadedError,
    TokenizerError,
    TracingError,
    UnknownCellError,
    printable,
)

_NO_HEADERS: Mapping[str, str] = {}
_NO_DETAILS: Mapping[str, object] = {}
NO_RETRY = {"x-should-retry": "false"}  # the official clients obey it
_ENGINE_RETRY_S = 5.0
_ANTHROPIC_PREFIX = "/v1/messages"
_ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that is sent to the client. The message is one sentence for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        details: Mapping[str, object] = _NO_DETAILS,
    ) -> None:
        """`details` are further fields of the error."""
        self.message = printable(message)
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers)
        self.details = details

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self, path: str = "") -> bytes:
        """Returns the JSON body in the shape of the API that `path` belongs to; OpenAI's if path is
        unknown."""
        if is_anthropic(path):
            return _anthropic_body(self)
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            **self.details,
        }
        return msgspec.json.encode({"error": error})

    def response(self, path: str = "") -> Response:
        return Response(
            self.body(path), self.status, headers=self.headers, media_type="application/json"
        )


def is_anthropic(path: str) -> bool:
    """Returns True if the path belongs to Anthropic's API."""
    return path == _ANTHROPIC_PREFIX or path.startswith(_ANTHROPIC_PREFIX + "/")


def _anthropic_body(error: ApiError) -> bytes:
    """Returns the JSON body in Anthropic's shape. `details` holds our own error code and the
    field."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    fields = {
        "type": _ANTHROPIC_TYPES.get(error.status, other),
        "message": error.message,
        "details": {"error_code": error.code, "param": error.param, **error.details},
    }
    return msgspec.json.encode({"type": "error", "error": fields})


def internal_error() -> ApiError:
    """Returns a 500 without internal details. The log has them, under the request id."""
    return ApiError(
        500,
        "The server failed to process this request. The server log has the cause under this "
        "X-Request-Id.",
        code="internal_error",
    )


def engine_dead_error() -> ApiError:
    return ApiError(
        503,
        "The engine has stopped. The server must be restarted.",
        code="engine_dead",
        headers=retry_headers(_ENGINE_RETRY_S),
    )


def draining_error(message: str, retry_after_s: float = _ENGINE_RETRY_S) -> ApiError:
    return ApiError(503, message, code="server_draining", headers=retry_headers(retry_after_s))


def to_api_error(error: Exception) -> ApiError:
    """Converts any exception to an answer. An unexpected exception becomes a plain 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _from_http_exception(error)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), code=error.code, param=error.param)
    if isinstance(error, ModelNotFoundError):
        return ApiError(404, str(error), code="model_not_found", param="model")
    if isinstance(error, ServerOverloadedError):
        if error.is_draining:
            return draining_error(str(error), error.retry_after_s)
        headers = {**retry_headers(error.retry_after_s), "x-should-retry": "true"}
        return ApiError(429, str(error), code="server_overloaded", headers=headers)
    if isinstance(error, TracingError):
        return ApiError(409, str(error), code="tracing_conflict")
    if isinstance(error, RebalanceError):
        return ApiError(409, str(error), code="rebalance_conflict")
    if isinstance(error, UnknownCellError):
        return ApiError(404, str(error), code="cell_not_found")
    if isinstance(error, CellsError):
        return ApiError(409, str(error), code="cells_conflict")
    if isinstance(error, TokenizerError):
        return ApiError(500, str(error), code="tokenizer_failed", headers=NO_RETRY)
    if isinstance(error, GenerationError):
        return ApiError(500, str(error), code="generation_failed")
    return internal_error()


def error_handler(overload_status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Returns the exception handler that FastAPI calls for every known kind of error.

    `overload_status` is the HTTP status sent when the queue is full.
    """

    async def handle(request: Request, error: Exception) -> Response:
        answer = to_api_error(error)
        if answer.code == "server_overloaded":
            answer.status = overload_status
        return answer.response(request.url.path)

    return handle


HANDLED_ERRORS: tuple[type[Exception], ...] = (ApiError, HTTPException, MoeServeError)


def _from_http_exception(error: HTTPException) -> ApiError:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = "This route does not exist. /openapi.json lists the routes of this server."
        return ApiError(404, message, code="route_not_found", headers=headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        message = f"This route does not accept this HTTP method. Allowed: {allowed}."
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    if error.status_code >= 500:
        return internal_error()
    return ApiError(error.status_code, str(error.detail), code="bad_request", headers=headers)


def retry_headers(retry_after_s: float) -> dict[str, str]:
    return {
        "Retry-After": str(max(1, math.ceil(retry_after_s))),
        "Retry-After-Ms": str(max(1, math.ceil(retry_after_s * 1000))),
    }
