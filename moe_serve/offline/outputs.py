"""The results of `LLM.generate`. Names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's natural log probability; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer. `logprobs` has a dict per token: token id -> Logprob, the chosen one included."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Seconds from the call of `generate` to the first token and to the last."""

    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its `n` answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int = 0  # of the prompt, for the first answer
    num_dropped_tokens: int = 0  # with `kv_window`: not seen at the end, over all answers
    finished: bool = True
