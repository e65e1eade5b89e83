"""Checks the parameters that every route checks before its requests go to the engine."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.engine.request.request import MAX_PRIORITY
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.bad_words import with_bad_word_ids
from moe_serve.errors import InvalidGrammarError, InvalidRequestError
from moe_serve.http.gate.auth import current_client
from moe_serve.http.generation.context import ServerContext


async def admit_params(
    server: ServerContext, params: SamplingParams, param: str | None = None
) -> SamplingParams:
    """Compiles the constraint, which came from the field `param`, and converts bad words to token
    ids."""
    if params.constraint is not None:
        try:
            constraint = await server.gate.admit(params.constraint, current_client().name)
        except InvalidGrammarError as error:
            if param is None:
                raise InvalidGrammarError(str(error), param=None) from None
            raise error.of_field(param) from None
        params = replace(params, constraint=constraint)
    return with_bad_word_ids(params, server.model.tokenizer)


def admit_priority(server: ServerContext, priority: int | None) -> int:
    """The priority of a request's sequences.

    A client may be less urgent than its key allows, but not more urgent; otherwise it could delay
    all other clients.
    """
    own = current_client().settings.min_priority
    lowest = server.config.key_min_priority if own is None else own
    if priority is None:
        return max(0, lowest)
    if priority < lowest:
        raise InvalidRequestError(
            f"priority must be in [{lowest}, {MAX_PRIORITY}] for this client, got {priority}. A "
            "lower number is more urgent. The lower bound is server.key_min_priority, or "
            "min_priority of the API key.",
            param="priority",
        )
    return priority
