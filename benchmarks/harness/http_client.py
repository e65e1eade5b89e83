"""One streamed completion over HTTP, with its times. Speaks the OpenAI completions protocol."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request of the load. `prompt` is token ids or text."""

    prompt: list[int] | str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Times in seconds. If `error` is set the rest is meaningless."""

    start: float = 0.0
    end: float = 0.0
    ttft_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.end - self.start - self.ttft_s) / (self.num_output_tokens - 1)


async def complete(client: httpx.AsyncClient, model: str, sent: Sent) -> Answered:
    """POST /v1/completions as a greedy stream, and read it to its end."""
    body = {
        "model": model,
        "prompt": sent.prompt,
        "max_tokens": sent.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                return Answered(error=f"HTTP {response.status_code}: {text[:200]}")
            return await _read(response, start)
    except httpx.HTTPError as error:
        return Answered(error=f"{type(error).__name__}: {error}")


async def _read(response: httpx.Response, start: float) -> Answered:
    first: float | None = None
    last = start
    usage: dict[str, Any] = {}
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        chunk = json.loads(data)
        if "error" in chunk:
            return Answered(error=str(chunk["error"])[:200])
        usage = chunk.get("usage") or usage
        if chunk.get("choices"):
            last = time.perf_counter()
            first = first or last
    else:
        return Answered(error="the stream ended without [DONE]")
    if first is None or not usage:
        return Answered(error="the stream had no tokens or no usage")
    return Answered(
        start=start,
        end=last,
        ttft_s=first - start,
        num_prompt_tokens=int(usage["prompt_tokens"]),
        num_output_tokens=int(usage["completion_tokens"]),
    )
