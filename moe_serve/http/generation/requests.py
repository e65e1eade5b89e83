"""Builds the engine's requests from prompts and parameters, and makes the checks that need both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_serve.engine.request.request import MAX_PRIORITY, GenerationRequest
from moe_serve.engine.request.sampling_params import MAX_CHOICES, SamplingParams
from moe_serve.engine.sampling.bad_words import with_bad_word_ids
from moe_serve.errors import ContextLengthError, InvalidGrammarError, InvalidRequestError
from moe_serve.http.gate.auth import current_client
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import Prompt, check_prompt_length, tokens_requested
from moe_serve.http.schema.schemas import GenerationBody


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


MAX_PROMPT_LOGPROBS = 2_000_000  # of one request, over all its choices
MAX_GIVEN_LOGPROBS = 2_000_000  # of one complete answer, over all its choices; a stream holds none


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """The limits of the engine. `default_max_tokens` None: up to the end of the context."""

    max_model_len: int
    vocab_size: int
    default_max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    prompt_logprobs_field: str = "prompt_logprobs"


def build_engine_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    limits: TokenLimits,
    cache_salt: str = "",
    priority: int = 0,
) -> list[GenerationRequest]:
    """Builds one request per prompt and choice, in the order of the answer's `choices`.

        2 prompts, n = 3:  choice index 0 1 2 | 3 4 5,  GenerationRequest.choice 0 1 2 | 0 1 2

    Only choice 0 of a prompt requests the log probabilities of the prompt.
    """
    num_sequences = len(prompts) * params.n
    if num_sequences > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {params.n} give {num_sequences} sequences; at most "
            f"{MAX_CHOICES} are allowed.",
            param="n",
        )
    params.check_vocabulary(limits.vocab_size)
    _check_prompt_logprobs(prompts, params, limits)
    now = time.monotonic()
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        _check_prompt(prompt, limits, params.max_tokens)
        fitting = _with_max_tokens(params, prompt, limits)
        others = fitting
        if fitting.prompt_logprobs is not None:
            others = replace(fitting, prompt_logprobs=None)
        for choice in range(params.n):
            requests.append(
                GenerationRequest(
                    request_id=f"{response_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    params=fitting if choice == 0 else others,
                    choice=choice,
                    arrival_time=now,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
    return requests


def check_given_logprobs(
    requests: Sequence[GenerationRequest], max_model_len: int, *, is_streamed: bool
) -> None:
    """Limits the memory that `logprob_token_ids` takes in a complete answer."""
    given = len(requests[0].params.logprob_token_ids)
    if not given or is_streamed:
        return
    num_tokens = sum(
        r.params.max_tokens or max_model_len - len(r.prompt_token_ids) for r in requests
    )
    count = num_tokens * (given + 1)
    if count > MAX_GIVEN_LOGPROBS:
        raise InvalidRequestError(
            f"logprob_token_ids requests up to {count} log probabilities ({num_tokens} tokens in "
            f"{len(requests)} choices, {given + 1} each); an answer without stream is limited to "
            f"{MAX_GIVEN_LOGPROBS}. Set a smaller max_tokens, or use stream: true.",
            param="logprob_token_ids",
        )


def _check_prompt(prompt: Prompt, limits: TokenLimits, max_tokens: int | None) -> None:
    """Checks the length, then the ids: the length bounds the cost of reading every id."""
    param = prompt.param
    if not prompt.token_ids:
        raise InvalidRequestError(f"{param} must have at least one token.", param=param)
    check_prompt_length(len(prompt.token_ids), param, limits.max_model_len, max_tokens)
    low, high = min(prompt.token_ids), max(prompt.token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        shown = wrong if abs(wrong) < 2**63 else "a number beyond 64 bits"
        raise InvalidRequestError(
            f"{param}: token ids must be in [0, {limits.vocab_size - 1}], got {shown}.",
            param=param,
        )


def _check_prompt_logprobs(
    prompts: Sequence[Prompt], params: SamplingParams, limits: TokenLimits
) -> None:
    """Limits the log probabilities of prompts: they stay in memory until the answer is written."""
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * params.n
    count = num_tokens * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        field = limits.prompt_logprobs_field
        raise InvalidRequestError(
            f"{field} = {params.prompt_logprobs} requests {count} log probabilities of the "
            f"prompt ({num_tokens} tokens in {len(prompts)} prompts and n = {params.n} choices, "
            f"{params.prompt_logprobs + 1} each); at most {MAX_PROMPT_LOGPROBS} are allowed.",
            param=field.rpartition(" ")[2],
        )


def _with_max_tokens(params: SamplingParams, prompt: Prompt, limits: TokenLimits) -> SamplingParams:
    count = len(prompt.token_ids)
    room = limits.max_model_len - count
    if params.max_tokens is None:
        if limits.default_max_tokens is None:
            return params
        max_tokens = min(limits.default_max_tokens, room)
        if params.min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({params.min_tokens}) must not exceed {limits.max_tokens_field}, "
                f"which is {max_tokens} by default for this prompt.",
                param="min_tokens",
            )
        return replace(params, max_tokens=max_tokens)
    if params.max_tokens > room:
        used = tokens_requested(limits.max_model_len, count, prompt.param, params.max_tokens)
        field = limits.max_tokens_field
        raise ContextLengthError(f"{used} {field} must be at most {room} here.", param=field)
    return params


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
