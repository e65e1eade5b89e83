"""`return_routed_experts`: which requests have their experts told, and when that is too much."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.schema.schemas import GenerationBody

MAX_ROUTED_IDS = 16_000_000  # that one answer may hold; of a stream nothing is held


def with_routed_experts(
    requests: list[GenerationRequest], body: GenerationBody, server: ServerContext
) -> list[GenerationRequest]:
    """The requests, asking if the body does. Raises InvalidRequestError for a whole answer that
    could hold too many ids."""
    if not body.return_routed_experts:
        return requests
    room, each = server.model.max_model_len, server.model.ids_per_token
    num_tokens = sum(r.params.max_tokens or room - len(r.prompt_token_ids) for r in requests)
    if not body.stream and num_tokens * each > MAX_ROUTED_IDS:
        raise InvalidRequestError(
            f"return_routed_experts of up to {num_tokens} tokens with {each} expert ids each is "
            f"{num_tokens * each} ids; a whole answer holds at most {MAX_ROUTED_IDS}. Ask for "
            "fewer tokens, or for a stream.",
            param="return_routed_experts",
        )
    return [replace(request, wants_routed_experts=True) for request in requests]
