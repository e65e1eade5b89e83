"""A small client of the chat completions route: one streamed answer at a time.

It knows HTTP and server-sent events, but nothing of terminals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from moe_serve.bench.client.plain_text import plain
from moe_serve.cli.client.server_client import NotReachedError, ServerClient, refusal

MIN_TIMED_TOKENS = 8  # fewer may come in one piece, and their rate would say nothing
_LONGEST = 2000  # characters of a message from the server
_TOKENS = (
    "content",
    "reasoning",
    "reasoning_content",
    "tool_calls",
    "refusal",
)  # fields of a delta that hold tokens


class ChatError(Exception):
    """The server could not be reached or refused the request. `str(error)` is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of the conversation, with the field names of the API."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Sampling options from the command line; None leaves an option to the server."""

    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(slots=True)
class AnswerTiming:
    """Times of one answer in seconds since the request was sent, filled while it streams."""

    num_tokens: int | None = None  # from the server's usage, which comes last
    first_s: float | None = None
    last_s: float | None = None

    def summary(self) -> str:
        """Returns text like "42 tokens, 61.3 tokens/s, first after 35 ms", with the known
        values."""
        parts = [] if self.num_tokens is None else [f"{self.num_tokens} tokens"]
        if self.first_s is not None and self.last_s is not None:
            duration = self.last_s - self.first_s
            if self.num_tokens is not None and self.num_tokens >= MIN_TIMED_TOKENS and duration:
                parts.append(f"{(self.num_tokens - 1) / duration:.1f} tokens/s")
            parts.append(f"first after {self.first_s * 1000:.0f} ms")
        return ", ".join(parts)


class ChatClient:
    """A client of the server at `url`. Close it, or use `with`."""

    def __init__(
        self, url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
    ) -> None:
        timeout = httpx.Timeout(600.0, connect=5.0)
        self._server = ServerClient(url, api_key, timeout, transport)
        self.url = self._server.url

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    def model(self) -> str:
        """Returns the name of the model that the server serves."""
        try:
            response = self._server.request("GET", "/v1/models")
            self._raise_for_status(response)
            models = response.json()["data"]
            return str(models[0]["id"])
        except NotReachedError as error:
            raise ChatError(str(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self.url} answers, but not like an OpenAI-compatible server.") from (
                error
            )

    def answer(
        self,
        model: str,
        messages: Sequence[Message],
        options: ChatOptions,
        timing: AnswerTiming,
    ) -> Generator[str, None, None]:
        """Yields the pieces of the answer as they arrive. Closing the iterator aborts the
        request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": item.role, "content": item.content} for item in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.temperature is not None:
            body["temperature"] = options.temperature
        if options.max_tokens is not None:
            body["max_tokens"] = options.max_tokens
        if not all(_is_text(item.content) for item in messages):
            raise ChatError("the message has bytes that are not UTF-8; nothing was sent.")
        start = time.perf_counter()
        try:
            with self._server.stream("/v1/chat/completions", body) as response:
                if response.is_error:
                    response.read()
                self._raise_for_status(response)
                for event in sse_events(response.iter_lines()):
                    delta = _delta_of(event, timing)
                    if any(delta.get(name) for name in _TOKENS):
                        timing.last_s = time.perf_counter() - start
                        timing.first_s = timing.first_s or timing.last_s
                    if text := str(delta.get("content") or ""):
                        yield text
        except httpx.HTTPError as error:
            raise ChatError(str(self._server.unreachable(error))) from error

    def _raise_for_status(self, response: httpx.Response) -> None:
        if response.is_error:
            raise ChatError(refusal(response, response.reason_phrase))


def _is_text(content: str) -> bool:
    """Whether the text is valid UTF-8: other bytes from a terminal or pipe arrive as lone
    surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in content)


def sse_events(lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    """Yields the JSON objects of a stream of server-sent events, up to `[DONE]`."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # a comment (": ping"), an event name, or the empty line between events
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError(
                f"the server sent an event that is not JSON: {plain(data, 80)}"
            ) from error
        if isinstance(event, dict):
            yield event
    raise ChatError("the connection ended before the answer did.")


def _delta_of(event: Mapping[str, Any], timing: AnswerTiming) -> Mapping[str, Any]:
    """Returns the delta of an event. Its usage, which counts the tokens of all kinds, goes into
    `timing`."""
    if error := event.get("error"):
        said = error.get("message", error) if isinstance(error, dict) else error
        raise ChatError(f"the server ended the answer: {plain(str(said), _LONGEST)}")
    try:
        if isinstance(number := (event.get("usage") or {}).get("completion_tokens"), int):
            timing.num_tokens = number
        choices = event.get("choices") or [{}]
        delta: Mapping[str, Any] = choices[0].get("delta") or {}
        delta.get("content")
    except (AttributeError, LookupError, TypeError):
        raise ChatError(
            f"the server sent an event of another kind: {plain(str(event), 80)}"
        ) from None
    return delta
