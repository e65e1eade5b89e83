"""The lines of a batch file, in OpenAI's format, and the rows that answer them.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

{"id": "batch_req_1", "custom_id": "a", "response": {...}, "error": null}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.json_text import parse_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ROW_START = b'{"id": "batch_req_'  # with which each row begins
_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """A line that can be sent."""

    number: int  # from 1
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """The row written for a line: an answer of the server (of any status), or the reason why there
    is none."""

    number: int
    custom_id: str | None
    status: int | None = None
    request_id: str = ""
    body: Any = None
    error_code: str = ""
    error_message: str = ""

    @property
    def is_good(self) -> bool:
        return self.status is not None and self.status < 400

    def to_json(self) -> bytes:
        """Returns the row as JSON with its newline."""
        response, error = None, None
        if self.status is None:
            error = {"code": self.error_code, "message": self.error_message}
        else:
            response = {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": self.body,
            }
        row = {
            "id": row_id(self.number),
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def row_id(number: int) -> str:
    """Returns the id of the row of a line."""
    return f"batch_req_{number}"


def read_line(number: int, text: bytes) -> BatchLine | BatchRow:
    """Returns the line, or a row that says what is wrong with it."""
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        return _bad(number, None, "invalid_json", f"line {number} is not JSON: {why}.")
    if not isinstance(content, dict):
        return _bad(number, None, "invalid_json", f"line {number} is not a JSON object.")
    custom_id = content.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        message = f"line {number}: custom_id must be a string of 1 to {_MAX_ID_CHARS} characters."
        return _bad(number, None, "invalid_custom_id", message)
    method, url, body = content.get("method", "POST"), content.get("url"), content.get("body")
    if method != "POST":
        message = f"line {number}: method must be POST, got {str(method)[:40]!r}."
        return _bad(number, custom_id, "invalid_method", message)
    if url not in URLS:
        message = f"line {number}: url must be one of {', '.join(URLS)}; got {str(url)[:80]!r}."
        return _bad(number, custom_id, "invalid_url", message)
    if not isinstance(body, dict):
        message = f"line {number}: body must be a JSON object."
        return _bad(number, custom_id, "invalid_body", message)
    if body.get("stream"):
        message = f"line {number}: a batch has no streams; leave `stream` out."
        return _bad(number, custom_id, "invalid_body", message)
    return BatchLine(number=number, custom_id=custom_id, url=url, body=body)


def repeated(number: int, custom_id: str, first: int) -> BatchRow:
    """Returns the row of a line whose custom_id an earlier line has; the row has no custom_id, as
    the earlier row has it."""
    message = f"line {number} has the custom_id of line {first}, {custom_id[:80]!r}."
    return _bad(number, None, "repeated_custom_id", message)


def _bad(number: int, custom_id: str | None, code: str, message: str) -> BatchRow:
    return BatchRow(number=number, custom_id=custom_id, error_code=code, error_message=message)
