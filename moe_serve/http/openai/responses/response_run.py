"""Runs one response from start to end, and builds the response object of each moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moe_serve.engine.request.request import FinishReason
from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece
from moe_serve.http.generation.logprob_format import MAX_INLINE_LOGPROBS, chat_logprobs
from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.responses.input_items import Item
from moe_serve.http.openai.responses.output_items import Event, Logprobs, OutputItems
from moe_serve.http.openai.responses.response_body import ResponsesBody
from moe_serve.http.schema.api_error import ApiError
from moe_serve.text.tokenizer import Tokenizer

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRecord:
    """The data of a response that does not change between its start and its end."""

    id: str
    created_at: int
    model: str
    body: ResponsesBody
    service_tier: str = "default"

    def as_json(
        self,
        status: Status,
        output: Sequence[Item],
        usage: dict[str, Any] | None = None,
        error: ApiError | None = None,
    ) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model,
            "output": list(output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": self.service_tier,
            "store": body.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [_with_defaults(tool) for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "metadata": body.metadata or {},
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: ApiError) -> dict[str, Any]:
    """Returns the error object. OpenAI's codes are a closed set that does not contain our own."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    return {"code": code, "message": error.message}


def _with_defaults(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "description": None, "parameters": None, **tool}


class ResponseRun:
    """Reads the chat and numbers the events that it makes from it.

    `result` is the response object after `events` has ended.
    """

    def __init__(self, record: ResponseRecord, chat: ChatGeneration, tokenizer: Tokenizer) -> None:
        self.record = record
        self.chat = chat
        self.result: dict[str, Any] = {}
        self._tokenizer = tokenizer
        self._output = OutputItems()
        self._status: Literal["completed", "incomplete"] = "completed"
        self._has_cut_call = False
        self._num_logprobs = 0
        self._num_events = 0

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the server-sent events. One chunk may hold several."""
        for kind in ("created", "in_progress"):
            start = self.record.as_json("in_progress", ())
            yield self._write([{"type": f"response.{kind}", "response": start}])
        async for pieces in self.chat:
            yield self._write([event for piece in pieces for event in self._push(piece)])
        last = self._finish()
        is_small = self._num_logprobs <= MAX_INLINE_LOGPROBS
        yield self._write(last) if is_small else await asyncio.to_thread(self._write, last)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the response object of a run that ended with this error."""
        usage = usage_json(self.chat.usage())
        return self.record.as_json("failed", self._output.snapshot(), usage, error)

    def failed_event(self, error: ApiError) -> bytes:
        return self._write([{"type": "response.failed", "response": self.failed(error)}])

    def cancelled(self) -> dict[str, Any]:
        return self.record.as_json("cancelled", self._output.snapshot())

    def _push(self, piece: ChatPiece) -> list[Event]:
        delta = piece.delta
        if piece.finish_reason == FinishReason.LENGTH.value:
            self._status = "incomplete"
        self._has_cut_call = piece.has_cut_call
        return self._output.push(delta, self._logprobs(piece))

    def _logprobs(self, piece: ChatPiece) -> Logprobs:
        if piece.logprobs is None:
            return ()
        self._num_logprobs += piece.num_logprobs
        entries: Logprobs = chat_logprobs(piece.logprobs, self._tokenizer)["content"]
        return entries

    def _finish(self) -> list[Event]:
        events = self._output.finish("incomplete" if self._has_cut_call else self._status)
        usage = usage_json(self.chat.usage())
        self.result = self.record.as_json(self._status, self._output.items, usage)
        return [*events, {"type": f"response.{self._status}", "response": self.result}]

    def _write(self, events: Sequence[Event]) -> bytes:
        chunks: list[bytes] = []
        for event in events:
            data = msgspec.json.encode({**event, "sequence_number": self._num_events})
            self._num_events += 1
            chunks.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data))
        return b"".join(chunks)
