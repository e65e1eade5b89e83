"""A running call of `LLM.generate`: prompts, growing answers, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_serve.adapters.adapter import Adapter
from moe_serve.adapters.registry import AdapterRegistry
from moe_serve.config.adapter_config import AdapterConfig, ExpertLora
from moe_serve.config.tiers import TierConfig, find_tier
from moe_serve.engine.request.request import (
    DecodingRules,
    FinishReason,
    GenerationRequest,
    TokenDelta,
    TokenLogprob,
)
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.bad_words import bad_word_ids
from moe_serve.engine.sampling.grammar.gate import GrammarGate
from moe_serve.engine.sampling.thinking_limit import limiting_markers
from moe_serve.errors import (
    ConfigError,
    ContextLengthError,
    GenerationError,
    InvalidRequestError,
)
from moe_serve.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from moe_serve.text.assistant.formats import ReasoningFormat
from moe_serve.text.text_stream import TextStream
from moe_serve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
_END_TOKENS = 64  # a prompt's last tokens show whether reasoning has begun


@dataclass(slots=True)
class GrowingAnswer:
    """One of a prompt's answers while it grows."""

    request: GenerationRequest
    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_dropped_tokens: int = 0
    finish_reason: FinishReason = FinishReason.ABORT
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Job:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    answers: list[GrowingAnswer]
    start_time: float
    first_token_time: float | None = None
    end_time: float = 0.0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Converts one text, one list of ids, or a list of either into a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts must be a string, token ids, or a list of either, got {prompts!r}.",
            param="prompts",
        )
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    made: list[Prompt] = []
    for item in items:
        if not isinstance(item, Sequence):
            raise InvalidRequestError(
                f"A prompt must be a string or a list of token ids, got {item!r}.",
                param="prompts",
            )
        made.append(item)
    return made


_NO_TIER = TierConfig(name="")


def _listed(names: str | Sequence[str | None], count: int, param: str) -> list[Any]:
    """Returns a name for each prompt."""
    if not isinstance(names, str | Sequence):
        raise InvalidRequestError(
            f"{param} cannot be {names!r:.60}: give one name for all prompts, or one for each.",
            param=param,
        )
    return [names] * count if isinstance(names, str) else list(names)


def tiers_of(
    names: str | Sequence[str], num_prompts: int, tiers: Sequence[TierConfig]
) -> list[TierConfig]:
    """Returns the tier of each prompt: one name for all, or one for each; empty: the first tier."""
    listed = _listed(names, num_prompts, "service_tier")
    if len(listed) != num_prompts:
        raise InvalidRequestError(
            f"{num_prompts} prompts came with {len(listed)} names in service_tier: give one for "
            "all prompts, or one for each.",
            param="service_tier",
        )
    found: list[TierConfig] = []
    for name in listed:
        tier = (tiers[0] if tiers else _NO_TIER) if name == "" else find_tier(tiers, name)
        if tier is None:
            known = ", ".join(each.name for each in tiers) or "none: give LLM its tiers"
            raise InvalidRequestError(
                f"service_tier cannot be {name!r:.60}; the tiers are {known}.",
                param="service_tier",
            )
        found.append(tier)
    return found


def limited(rules: DecodingRules, tier: TierConfig) -> DecodingRules:
    """Returns the rules with the tier's limit of an answer."""
    most = tier.max_output_tokens
    if most is None:
        return rules
    return replace(rules, max_tokens=min(most, rules.max_tokens or most))


def check_text_length(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses a text that cannot fit before it is tokenized."""
    min_tokens = tokenizer.min_num_tokens(text)
    if min_tokens >= max_model_len:
        raise ContextLengthError(
            f"The prompt has {len(text)} characters, which are at least {min_tokens} tokens, but "
            f"the context is {max_model_len} tokens.",
            param="prompts",
        )


def resolve_rules(
    params: SamplingParams,
    ids: Sequence[int],
    tokenizer: Tokenizer,
    vocab_size: int,
    gate: GrammarGate,
    reasoning: Callable[[], ReasoningFormat | None],
) -> DecodingRules:
    """Returns the rules for the answers to one prompt. `reasoning` is called if it has a budget."""
    constraint = None if params.constraint is None else gate.check(params.constraint)
    thinking = params.limited_thinking
    if thinking is None and params.thinking_token_budget not in (None, -1):
        end = tokenizer.decode(ids[-_END_TOKENS:], skip_special_tokens=False)
        thinking = limiting_markers(params, constraint, reasoning(), end, tokenizer)
        params.check_vocabulary(vocab_size, thinking)
    return replace(
        DecodingRules.of(params),
        constraint=constraint,
        thinking_markers=thinking,
        bad_word_ids=bad_word_ids(params, thinking, tokenizer),
    )


def make_output(job: Job, tokenizer: Tokenizer) -> RequestOutput:
    """Converts the finished job into vLLM's result classes."""
    first = job.first_token_time or job.start_time
    return RequestOutput(
        request_id=job.request_id,
        prompt=job.prompt,
        prompt_token_ids=job.prompt_token_ids,
        prompt_logprobs=None
        if job.prompt_logprobs is None
        else [
            None if entry is None else _logprobs(entry, tokenizer) for entry in job.prompt_logprobs
        ],
        outputs=[_completion(index, answer, tokenizer) for index, answer in enumerate(job.answers)],
        num_cached_tokens=job.answers[0].num_cached_tokens,
        num_dropped_tokens=sum(answer.num_dropped_tokens for answer in job.answers),
        metrics=RequestMetrics(ttft_s=first - job.start_time, e2e_s=job.end_time - job.start_time),
    )


def _completion(index: int, answer: GrowingAnswer, tokenizer: Tokenizer) -> CompletionOutput:
    params, entries = answer.request.params, answer.logprobs
    return CompletionOutput(
        index=index,
        text="".join(answer.text),
        token_ids=tuple(answer.token_ids),
        finish_reason=answer.finish_reason.value,
        stop_reason=answer.stop_reason,
        logprobs=[_logprobs(e, tokenizer, is_ranked=not params.logprob_token_ids) for e in entries]
        if params.logprobs is not None
        else None,
        cumulative_logprob=None
        if params.logprobs is None
        else sum(entry.logprob for entry in entries),
    )


def _logprobs(
    entry: TokenLogprob, tokenizer: Tokenizer, *, is_ranked: bool = True
) -> dict[int, Logprob]:
    """Converts log probabilities. `is_ranked` means that the entry has the likeliest tokens, so
    that their order gives their ranks."""
    described = {
        token: Logprob(value, rank if is_ranked else None, tokenizer.token_text(token))
        for rank, (token, value) in enumerate(entry.top, start=1)
    }
    text = tokenizer.token_text(entry.token_id)
    return described | {entry.token_id: Logprob(entry.logprob, entry.rank, text)}


def check_prompt(ids: tuple[int, ...], params: SamplingParams, vocab_size: int, limit: int) -> None:
    """Raises InvalidRequestError or ContextLengthError for a prompt that the model cannot
    read."""
    if not ids:
        raise InvalidRequestError("The prompt is empty.", param="prompts")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequestError(
                f"A token id must be an integer, got {token!r}.", param="prompts"
            )
    wrong = next((i for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"Token id {wrong} is outside the vocabulary [0, {vocab_size - 1}].",
            param="prompts",
        )
    wanted = len(ids) + (params.max_tokens or 1)
    if wanted > limit:
        raise ContextLengthError(
            f"The prompt has {len(ids)} tokens and max_tokens is {params.max_tokens or 1}: "
            f"{wanted} together, but the context is {limit} tokens.",
            param="prompts",
        )
    params.check_vocabulary(vocab_size)


def adapter_config(adapters: Mapping[str, str], expert_lora: ExpertLora) -> AdapterConfig:
    """Returns the configuration of adapters by name: their folders."""
    if not isinstance(adapters, Mapping):
        raise ConfigError(f"adapters cannot be {adapters!r:.80} (LLM): give {{name: folder}}.")
    modules = tuple(f"{name}={folder}" for name, folder in adapters.items())
    return AdapterConfig(is_enabled=bool(modules), modules=modules, expert_lora=expert_lora)


def each_adapter(
    registry: AdapterRegistry | None, adapter: str | Sequence[str | None] | None, count: int
) -> list[Adapter | None]:
    """Returns the adapter of each of `count` prompts. Raises InvalidRequestError or
    ModelNotFoundError."""
    names = [None] * count if adapter is None else _listed(adapter, count, "adapter")
    if len(names) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(names)} adapters: give one name for all prompts, or "
            "one for each.",
            param="adapter",
        )
    if registry is None and any(name is not None for name in names):
        raise InvalidRequestError(
            "This LLM was made without adapters: give LLM(adapters={name: folder}).",
            param="adapter",
        )
    return [None if name is None or registry is None else registry.acquire(name) for name in names]


def take_delta(
    job: Job, answer: GrowingAnswer, delta: TokenDelta, abort: Callable[[str], None]
) -> bool:
    """Adds a delta to its answer, and aborts a request that its text has ended. Returns True if the
    answer is complete.
    """
    if delta.finish_reason is FinishReason.ERROR:
        raise GenerationError(f"{delta.request_id}: {delta.error}.")
    if delta.prompt_logprobs is not None:
        job.prompt_logprobs = delta.prompt_logprobs
    answer.num_cached_tokens = max(answer.num_cached_tokens, delta.num_cached_tokens)
    answer.num_dropped_tokens = max(answer.num_dropped_tokens, delta.num_dropped_tokens)
    job.first_token_time = job.first_token_time or time.monotonic()
    text = answer.stream.push(delta)
    answer.text.append(text.text)
    answer.token_ids += text.token_ids
    answer.logprobs += text.logprobs or ()
    if text.finish_reason is None:
        return False
    if text.is_stopped_by_text:
        abort(delta.request_id)
    answer.finish_reason, answer.stop_reason = text.finish_reason, text.stop_reason
    job.end_time = time.monotonic()
    return True
