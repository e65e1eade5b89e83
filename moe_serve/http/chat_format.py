"""The shapes of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moe_serve.http.answer import Choice
from moe_serve.http.chunk_format import ChunkWriter, ResponseHead, usage_fields
from moe_serve.http.generation import Usage
from moe_serve.http.logprob_format import chat_logprobs
from moe_serve.http.sequence import Piece
from moe_serve.text.text_stream import TextDelta
from moe_serve.text.tokenizer import Tokenizer

_ROLE = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'


class ChatChunks:
    """The events of one chat stream: a role, then content, then the reason for the end."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer, *, has_usage: bool) -> None:
        self._writer = ChunkWriter(head, has_usage=has_usage)
        self._tokenizer = tokenizer
        self._started: set[int] = set()

    def events(self, piece: Piece) -> bytes:
        delta = piece.delta
        index = b'{"index":%d,' % piece.index
        events: list[bytes] = []
        if piece.index not in self._started:
            self._started.add(piece.index)
            events.append(self._writer.choice(index + _ROLE))
        if delta.text or delta.logprobs:
            events.append(self._writer.choice(index + self._content(delta)))
        if delta.finish_reason is not None:
            events.append(self._writer.choice(index + _finish(delta)))
        return b"".join(events)

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage)

    def _content(self, delta: TextDelta) -> bytes:
        logprobs = b"null"
        if delta.logprobs is not None:
            logprobs = msgspec.json.encode(chat_logprobs(delta.logprobs, self._tokenizer))
        text = msgspec.json.encode(delta.text)
        return (
            b'"delta":{"content":' + text + b'},"logprobs":' + logprobs + b',"finish_reason":null}'
        )


def _finish(delta: TextDelta) -> bytes:
    assert delta.finish_reason is not None, "only a finished delta ends a choice"
    reason = msgspec.json.encode(delta.finish_reason.value)
    stop = msgspec.json.encode(delta.stop_reason)
    return (
        b'"delta":{},"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop + b"}"
    )


def chat_response(
    head: ResponseHead, choices: Sequence[Choice], usage: Usage, tokenizer: Tokenizer
) -> bytes:
    """The whole answer as one object."""
    content = {
        **head.fields(),
        "choices": [_choice(i, choice, tokenizer) for i, choice in enumerate(choices)],
        "usage": usage_fields(usage),
    }
    return msgspec.json.encode(content)


def _choice(index: int, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    assert choice.finish_reason is not None, "a collected choice has ended"
    logprobs = None
    if choice.logprobs is not None:  # as JSON at once: as objects, all choices would be too large
        logprobs = msgspec.Raw(msgspec.json.encode(chat_logprobs(choice.logprobs, tokenizer)))
    return {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason.value,
        "stop_reason": choice.stop_reason,
    }
