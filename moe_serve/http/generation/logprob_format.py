"""Formats what answers report about tokens: log probabilities and the experts that computed them.

Log probabilities have OpenAI's two shapes, those of prompts vLLM's. `return_routed_experts` adds

    "routed_experts": [[[k ids] for each layer with routed experts] for each token]
    "routed_tokens":  ["The", " king", ...]      the same tokens, as text
    "routed_drafts":  ["ngram", null, ...]       the drafter of each token, if one was drafted
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moe_serve.engine.request.request import TokenExperts, TokenLogprob
from moe_serve.text.tokenizer import Tokenizer

# most numbers that are formatted on the event loop; more would block it for milliseconds or seconds
MAX_INLINE_LOGPROBS = 2048
_LOWEST = -9999.0  # JSON has no -inf


def num_logprobs(*lists: Sequence[TokenLogprob | None] | None) -> int:
    """Counts the numbers to format: those of the chosen tokens and of their top alternatives."""
    count = 0
    for entries in lists:
        if entries:
            count += len(entries) * (1 + _num_top(entries))
    return count


def _num_top(entries: Sequence[TokenLogprob | None]) -> int:
    last = entries[-1]  # the first entry of a prompt is None
    return 0 if last is None else len(last.top)


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Formats `choices[].logprobs` of a chat: one object per token, with its bytes."""
    return {"content": [_chat_entry(entry, tokenizer) for entry in entries], "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    text_offsets: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Formats `choices[].logprobs` of a completion as parallel lists. The first prompt token has
    None."""
    return {
        "tokens": [tokenizer.token_text(token) for token in token_ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top_by_text(entry, tokenizer) for entry in entries],
        "text_offset": list(text_offsets),
    }


def _chat_entry(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_chat_token(token, logprob, tokenizer) for token, logprob in entry.top]
    return {**_chat_token(entry.token_id, entry.logprob, tokenizer), "top_logprobs": top}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _top_by_text(entry: TokenLogprob | None, tokenizer: Tokenizer) -> dict[str, float] | None:
    """Returns the top tokens and the chosen one. If two have the same text, the likelier one is
    kept."""
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        top.setdefault(tokenizer.token_text(token), finite(logprob))
    return top


def finite(logprob: float) -> float:
    """Limits a log probability to values that JSON can express."""
    return logprob if logprob >= _LOWEST else _LOWEST  # also for NaN


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> msgspec.Raw | None:
    """Returns a list with one object per prompt token; null for the first token.

    Each object is {"token id": {"logprob", "rank", "decoded_token"}}, with the token itself and the
    likeliest tokens at its position.
    """
    if entries is None:
        return None
    # Encoded at once: as Python objects a long prompt would take too much memory.
    return msgspec.Raw(msgspec.json.encode([_by_id(entry, tokenizer) for entry in entries]))


def _by_id(entry: TokenLogprob | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if entry is None:
        return None
    found = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)]
    found.append((entry.token_id, entry.logprob, entry.rank))
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, logprob, rank in found
    }


IDS_PER_LOGPROB = 64  # number of ids that take about as long to write as one log probability


def num_expert_ids(experts: Sequence[TokenExperts] | None) -> int:
    """Counts the expert ids to write."""
    return sum(each.num_ids for each in experts or ())


def routed_fields(
    experts: Sequence[TokenExperts], token_ids: Sequence[int], tokenizer: Tokenizer
) -> dict[str, msgspec.Raw]:
    """Returns the fields of a choice, as JSON: as Python lists an answer would be ten times as
    large."""
    tokens = [tokenizer.token_text(token) for token in token_ids]
    rows = b",".join(msgspec.json.encode(each.lists()) for each in experts)
    fields = {
        "routed_experts": msgspec.Raw(b"[" + rows + b"]"),
        "routed_tokens": msgspec.Raw(msgspec.json.encode(tokens)),
    }
    if any(each.drafter for each in experts):
        drafters = [each.drafter or None for each in experts]
        fields["routed_drafts"] = msgspec.Raw(msgspec.json.encode(drafters))
    return fields


def routed_json(
    experts: Sequence[TokenExperts] | None, token_ids: Sequence[int], tokenizer: Tokenizer
) -> bytes:
    """Returns the fields for a chunk of a stream, as JSON to append to its other fields; empty for
    None."""
    if experts is None:
        return b""
    return b"," + msgspec.json.encode(routed_fields(experts, token_ids, tokenizer))[1:-1]
