"""What every route does with its parameters before they go to the engine."""

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
    """The constraint is judged (`param`: the field it came from), and bad words become tokens."""
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
    """The priority of a request's sequences. A client may be less urgent than its key allows, and
    not more: else it could have all others wait."""
    own = current_client().settings.min_priority
    lowest = server.config.key_min_priority if own is None else own
    if priority is None:
        return max(0, lowest)
    if priority < lowest:
        raise InvalidRequestError(
            f"priority must be in [{lowest}, {MAX_PRIORITY}] for this client, got {priority}: a "
            "lower number is more urgent, and server.key_min_priority (or min_priority of an API "
            "key) says how urgent a request may be.",
            param="priority",
        )
    return priority
