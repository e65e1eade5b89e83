"""Formats the experts that computed each token of an answer as JSON: `return_routed_experts`.

"routed_experts": [[[k ids] for each layer with routed experts] for each token]
"routed_tokens":  ["The", " king", ...]      the same tokens, as text
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moe_serve.engine.request.request import TokenExperts
from moe_serve.text.tokenizer import Tokenizer

IDS_PER_LOGPROB = 64  # this many take about as long to write as one log probability


def num_expert_ids(experts: Sequence[TokenExperts] | None) -> int:
    """Counts the expert ids to write."""
    return sum(each.num_ids for each in experts or ())


def routed_fields(
    experts: Sequence[TokenExperts], token_ids: Sequence[int], tokenizer: Tokenizer
) -> dict[str, msgspec.Raw]:
    """The two fields of a choice, as JSON: as Python lists an answer would be ten times as
    large."""
    tokens = [tokenizer.token_text(token) for token in token_ids]
    rows = b",".join(msgspec.json.encode(each.lists()) for each in experts)
    return {
        "routed_experts": msgspec.Raw(b"[" + rows + b"]"),
        "routed_tokens": msgspec.Raw(msgspec.json.encode(tokens)),
    }


def routed_json(
    experts: Sequence[TokenExperts] | None, token_ids: Sequence[int], tokenizer: Tokenizer
) -> bytes:
    """The two fields for a chunk of a stream, as JSON to append to its other fields; empty for
    None."""
    if experts is None:
        return b""
    return b"," + msgspec.json.encode(routed_fields(experts, token_ids, tokenizer))[1:-1]
