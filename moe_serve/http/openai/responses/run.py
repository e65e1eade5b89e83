"""Runs one response from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import msgspec

from moe_serve.engine.request.request import FinishReason
from moe_serve.http.generation.chat_generation import ChatGeneration, ChatPiece
from moe_serve.http.generation.logprob_format import MAX_INLINE_LOGPROBS, chat_logprobs
from moe_serve.http.openai.responses.output_items import Event, Logprobs, OutputItems
from moe_serve.http.openai.responses.record import ResponseRecord, usage_json
from moe_serve.http.schema.errors import ApiError
from moe_serve.text.tokenizer import Tokenizer


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
        """The server-sent events. One chunk may hold several."""
        for kind in ("created", "in_progress"):
            start = self.record.as_json("in_progress", ())
            yield self._write([{"type": f"response.{kind}", "response": start}])
        async for pieces in self.chat:
            yield self._write([event for piece in pieces for event in self._push(piece)])
        last = self._finish()
        is_small = self._num_logprobs <= MAX_INLINE_LOGPROBS
        yield self._write(last) if is_small else await asyncio.to_thread(self._write, last)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response object of a run that ended with this error."""
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
