"""Parts of the JSON that chats and completions share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moe_serve.http.generation.sse import sse_event
from moe_serve.http.generation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields at the start of a response and of every chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None = None

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ChunkWriter:
    """Writes chunks with one choice each. The head is encoded once, the choice for every chunk.

    With `include_usage`, every chunk but the last has `"usage": null`, as OpenAI's do. With
    `usage_now`, each chunk has the usage so far instead, which counts the tokens of this chunk and
    of those before it, as reported to `count`.
    """

    def __init__(
        self,
        head: ResponseHead,
        *,
        has_usage: bool,
        usage_now: Callable[[], Usage] | None = None,
    ) -> None:
        self._usage_now = usage_now
        self._num_tokens = 0
        self._head = msgspec.json.encode(head.fields())[:-1]
        tail = b'],"usage":null}' if has_usage else b"]}"
        self._start = b"data: " + self._head + b',"choices":['
        self._end = tail + b"\n\n"

    def count(self, num_tokens: int) -> None:
        """Adds the number of answer tokens that the next chunk brings."""
        self._num_tokens += num_tokens

    def choice(self, choice_json: bytes, more: bytes = b"") -> bytes:
        """Writes one chunk. `more` has further fields of the chunk, each with a comma in front."""
        if self._usage_now is not None:
            so_far = replace(self._usage_now(), completion_tokens=self._num_tokens)
            usage = msgspec.json.encode(usage_fields(so_far))
            return self._start + choice_json + b"]" + more + b',"usage":' + usage + b"}\n\n"
        if more:
            return self._start + choice_json + b"]" + more + self._end[1:]
        return self._start + choice_json + self._end

    def usage(self, usage: Usage) -> bytes:
        last = {"choices": [], "usage": usage_fields(usage), **timing_fields(usage)}
        return sse_event(self._head + b"," + msgspec.json.encode(last)[1:])


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The `usage` object. Only chats have `completion_tokens_details`: nothing else has
    reasoning."""
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


def timing_fields(usage: Usage) -> dict[str, Any]:
    """The fields `metrics` (vLLM) and `timings` (llama.cpp), if the server reports them."""
    told = {"metrics": usage.timing, "timings": usage.llama_timings}
    return {name: times for name, times in told.items() if times is not None}
