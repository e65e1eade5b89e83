"""Reads the lines of a batch file in OpenAI's format, and writes the rows that answer them.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

{"id": "batch_req_1", "custom_id": "a", "response": {...}, "error": null}

Each row is appended whole, and a later run finds the rows of an earlier one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.errors import ConfigError
from moe_serve.json_text import parse_json

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ROW_START = b'{"id": "batch_req_'  # the beginning of each row
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
    """The row that is written for a line: the server's answer, of any status, or the reason why
    the server gave no answer."""

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
        message = (
            f"line {number}: stream must be false or left out, because a batch cannot stream "
            "answers."
        )
        return _bad(number, custom_id, "invalid_body", message)
    return BatchLine(number=number, custom_id=custom_id, url=url, body=body)


def repeated(number: int, custom_id: str, first: int) -> BatchRow:
    """Returns the row for a line that repeats the custom_id of an earlier line. It has no
    custom_id, because the row of the earlier line has it.
    """
    message = f"line {number} repeats the custom_id of line {first}, {custom_id[:80]!r}."
    return _bad(number, None, "repeated_custom_id", message)


def _bad(number: int, custom_id: str | None, code: str, message: str) -> BatchRow:
    return BatchRow(number=number, custom_id=custom_id, error_code=code, error_message=message)


class BatchOutput:
    """The output file, open for one process while a batch runs. Close it, or use `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids: set[str] = set()  # of rows without a custom_id
        self._custom_ids: set[str] = set()
        self.num_before = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ConfigError(f"cannot write the rows to {path}: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"another run is writing to {path}.") from None
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_regular:
            os.fsync(self._file)
        os.close(self._file)

    def has(self, number: int, custom_id: str | None) -> bool:
        """Returns whether an earlier run wrote the row of this line."""
        if custom_id is None:
            return row_id(number) in self._ids
        return custom_id in self._custom_ids

    def append(self, row: BatchRow) -> None:
        """Appends a row in one write, so that the file has the whole row or none of it, even if the
        process is killed.
        """
        self._write(row.to_json())

    def _write(self, content: bytes) -> None:
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: a row cannot be written: {error.strerror}. The rows already "
                "written stay: free some space, and run the same command again."
            ) from error
        if written < len(content):
            os.truncate(self._file, os.fstat(self._file).st_size - written)
            raise ConfigError(
                f"only {written} of the {len(content)} bytes of a row were written: is the "
                "disk full?"
            )

    @property
    def _is_regular(self) -> bool:
        return self.path.is_file()

    def _read(self) -> None:
        """Reads the rows of earlier runs, and cuts off half a row that a killed run has left at the
        end.
        """
        if not self._is_regular:
            return
        complete = 0
        with self.path.open("rb") as rows:
            for number, line in enumerate(rows, start=1):
                if not line.endswith(b"\n"):
                    self._end(number, line, complete)
                    return
                complete += len(line)
                if line.strip():
                    self._take(number, line)

    def _end(self, number: int, line: bytes, start: int) -> None:
        """Keeps a last line that lacks only its newline, and cuts off half a row."""
        if line[: len(ROW_START)] != ROW_START[: len(line)]:
            raise self._no_row(number)  # a file of another program, not half a row of ours
        try:
            json.loads(line)
        except ValueError:
            os.truncate(self._file, start)
            return
        self._take(number, line)
        self._write(b"\n")

    def _take(self, number: int, line: bytes) -> None:
        try:
            row = json.loads(line)
            custom_id, own_id = row["custom_id"], row["id"]
        except (ValueError, TypeError, KeyError):
            raise self._no_row(number) from None
        self.num_before += 1
        if isinstance(custom_id, str):
            self._custom_ids.add(custom_id)
        else:
            self._ids.add(str(own_id))

    def _no_row(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self.path}:{number} is not a row that run-batch wrote: name another output file."
        )
