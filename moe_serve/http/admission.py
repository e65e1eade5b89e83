"""What every route does with its parameters before they go to the engine."""

from __future__ import annotations

from dataclasses import replace

from moe_serve.engine.bad_words import with_bad_word_ids
from moe_serve.engine.sampling_params import SamplingParams
from moe_serve.errors import InvalidGrammarError
from moe_serve.http.auth import current_client
from moe_serve.http.context import ServerContext


async def admit_params(
    server: ServerContext, params: SamplingParams, param: str | None = None
) -> SamplingParams:
    """The constraint is judged (`param`: the field it came from), and bad words become tokens."""
    if params.constraint is not None:
        try:
            constraint = await server.gate.admit(params.constraint, current_client())
        except InvalidGrammarError as error:
            if param is None:
                raise InvalidGrammarError(str(error), param=None) from None
            raise error.of_field(param) from None
        params = replace(params, constraint=constraint)
    return with_bad_word_ids(params, server.model.tokenizer)
