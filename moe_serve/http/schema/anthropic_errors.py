"""Writes errors in the shape of Anthropic's API: {"type": "error", "error": {"type",
"message"}}."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_PREFIX = "/v1/messages"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """True if the path belongs to Anthropic's API."""
    return path == _PREFIX or path.startswith(_PREFIX + "/")


def anthropic_error(status: int, message: str, code: str, param: str | None) -> bytes:
    """The body of an error. `details` holds our own error code and the field that caused it."""
    details = {"error_code": code, "param": param}
    error = {"type": _error_type(status), "message": message, "details": details}
    return msgspec.json.encode({"type": "error", "error": error})


def _error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
