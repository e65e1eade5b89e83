"""Marks the requests that return their routed experts, and limits the size of such an answer."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.schema.schemas import GenerationBody

MAX_ROUTED_IDS = 16_000_000  # in one complete answer; a stream holds none


def with_routed_experts(
    requests: list[GenerationRequest], body: GenerationBody, server: ServerContext
) -> list[GenerationRequest]:
    """Marks the requests if the body has `return_routed_experts`.

    Raises InvalidRequestError if an answer without stream could hold too many ids.
    """
    if not body.return_routed_experts:
        return requests
    room, each = server.model.max_model_len, server.model.ids_per_token
    num_tokens = sum(r.params.max_tokens or room - len(r.prompt_token_ids) for r in requests)
    if not body.stream and num_tokens * each > MAX_ROUTED_IDS:
        raise InvalidRequestError(
            f"return_routed_experts for up to {num_tokens} tokens with {each} expert ids each "
            f"gives {num_tokens * each} ids; an answer without stream is limited to "
            f"{MAX_ROUTED_IDS}. Set a smaller max_tokens, or use stream: true.",
            param="return_routed_experts",
        )
    return [replace(request, wants_routed_experts=True) for request in requests]
