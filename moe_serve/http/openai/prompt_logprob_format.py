"""Writes the log probabilities of a prompt as a separate field, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moe_serve.engine.request.request import TokenLogprob
from moe_serve.http.generation.logprob_format import finite
from moe_serve.text.tokenizer import Tokenizer


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> msgspec.Raw | None:
    """A list with one object per prompt token; null for the first token.

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
