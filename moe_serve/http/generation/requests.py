"""Builds the engine's requests from prompts and parameters, and makes the checks that need both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.request import MAX_PRIORITY, DecodingRules, GenerationRequest
from moe_serve.engine.request.sampling_params import MAX_CHOICES, SamplingParams
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.sampling.bad_words import bad_word_ids
from moe_serve.errors import ContextLengthError, InvalidGrammarError, InvalidRequestError
from moe_serve.http.gate.auth import current_client
from moe_serve.http.generation.chat_request import AnswerOptions
from moe_serve.http.generation.context import EngineLimits, ServerContext
from moe_serve.http.generation.prompts import Prompt, check_prompt_length, tokens_requested


async def resolve_rules(
    server: ServerContext,
    params: SamplingParams,
    *,
    constraint: Constraint | None,
    constraint_field: str | None,
    thinking: ThinkingMarkers | None = None,
) -> DecodingRules:
    """Compiles the constraint, which came from the given field, and converts bad words to token
    ids."""
    if constraint is not None:
        try:
            constraint = await server.gate.admit(constraint, current_client().name)
        except InvalidGrammarError as error:
            if constraint_field is None:
                raise InvalidGrammarError(str(error), param=None) from None
            raise error.of_field(constraint_field) from None
    return replace(
        DecodingRules.of(params),
        constraint=constraint,
        thinking_markers=thinking,
        bad_word_ids=bad_word_ids(params, thinking, server.model.tokenizer),
    )


def admit_priority(server: ServerContext, priority: int | None) -> int:
    """Returns the priority of a request's sequences.

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


def with_entitlement(
    server: ServerContext, options: AnswerOptions, headers: Mapping[str, str]
) -> AnswerOptions:
    """Adds the service that the client gets. `headers` are those of its request.

    Raises InvalidRequestError for a tier or target that it may not have.
    """
    wish = options.wish.with_headers(headers)
    return replace(options, entitlement=server.tiers.admit(wish, current_client()))


def client_salt(server: ServerContext, cache_salt: str) -> str:
    """Returns the salt of a request's pages. If keys are separated, the API key is a part of it."""
    if not server.separates_keys:
        return cache_salt
    return f"{current_client().name} {cache_salt}"


MAX_PROMPT_LOGPROBS = 2_000_000  # of one request, over all its choices
MAX_GIVEN_LOGPROBS = 2_000_000  # of one complete answer, over all its choices; a stream holds none
MAX_ROUTED_IDS = 16_000_000  # in one complete answer; a stream holds none


def build_engine_requests(
    response_id: str,
    prompts: Sequence[Prompt],
    options: AnswerOptions,
    rules: DecodingRules,
    limits: EngineLimits,
    priority: int = 0,
    prediction: tuple[int, ...] = (),
) -> list[GenerationRequest]:
    """Builds one request per prompt and choice, in the order of the answer's `choices`.

        2 prompts, n = 3:  choice index 0 1 2 | 3 4 5,  GenerationRequest.choice 0 1 2 | 0 1 2

    Only choice 0 of a prompt requests the log probabilities of the prompt. `prediction` has the
    tokens that the client expects of every choice; those beyond the context are left out.
    """
    params = options.params
    num_sequences = len(prompts) * params.n
    if num_sequences > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n = {params.n} give {num_sequences} sequences; at most "
            f"{MAX_CHOICES} are allowed.",
            param="n",
        )
    params.check_vocabulary(limits.vocab_size, rules.thinking_markers)
    limits.kv_windows.check(params.kv_window)
    _check_prompt_logprobs(prompts, options)
    now = time.monotonic()
    requests: list[GenerationRequest] = []
    for prompt in prompts:
        _check_prompt(prompt, limits, params.max_tokens)
        first = replace(rules, max_tokens=_max_tokens(prompt, options, limits))
        others = replace(first, prompt_logprobs=None)
        for choice in range(params.n):
            requests.append(
                GenerationRequest(
                    request_id=f"{response_id}-{len(requests)}",
                    prompt_token_ids=prompt.token_ids,
                    params=params,
                    resolved=others if choice else first,
                    choice=choice,
                    arrival_time=now,
                    priority=priority,
                    cache_salt=options.cache_salt,
                    wants_routed_experts=options.wants_routed_experts,
                    may_draft=options.may_draft,
                    prediction=prediction[: limits.max_model_len - len(prompt.token_ids)],
                    service=options.entitlement.service,
                    adapter=options.adapter,
                )
            )
    if not options.is_streamed:
        _check_size(requests, limits)
    return requests


def _check_size(requests: Sequence[GenerationRequest], limits: EngineLimits) -> None:
    """Limits the memory of a complete answer: that of `logprob_token_ids` and of expert ids."""
    room = limits.max_model_len
    num_tokens = sum(r.rules.max_tokens or room - len(r.prompt_token_ids) for r in requests)
    given, each = len(requests[0].params.logprob_token_ids), limits.ids_per_token
    if given and num_tokens * (given + 1) > MAX_GIVEN_LOGPROBS:
        raise InvalidRequestError(
            f"logprob_token_ids requests up to {num_tokens * (given + 1)} log probabilities "
            f"({num_tokens} tokens in {len(requests)} choices, {given + 1} each); an answer "
            f"without stream is limited to {MAX_GIVEN_LOGPROBS}. Set a smaller max_tokens, or use "
            "stream: true.",
            param="logprob_token_ids",
        )
    if requests[0].wants_routed_experts and num_tokens * each > MAX_ROUTED_IDS:
        raise InvalidRequestError(
            f"return_routed_experts for up to {num_tokens} tokens with {each} expert ids each "
            f"gives {num_tokens * each} ids; an answer without stream is limited to "
            f"{MAX_ROUTED_IDS}. Set a smaller max_tokens, or use stream: true.",
            param="return_routed_experts",
        )


def _check_prompt(prompt: Prompt, limits: EngineLimits, max_tokens: int | None) -> None:
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


def _check_prompt_logprobs(prompts: Sequence[Prompt], options: AnswerOptions) -> None:
    """Limits the log probabilities of prompts: they stay in memory until the answer is written."""
    params = options.params
    if params.prompt_logprobs is None:
        return
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts) * params.n
    count = num_tokens * (params.prompt_logprobs + 1)
    if count > MAX_PROMPT_LOGPROBS:
        field = options.prompt_logprobs_field
        raise InvalidRequestError(
            f"{field} = {params.prompt_logprobs} requests {count} log probabilities of the "
            f"prompt ({num_tokens} tokens in {len(prompts)} prompts and n = {params.n} choices, "
            f"{params.prompt_logprobs + 1} each); at most {MAX_PROMPT_LOGPROBS} are allowed.",
            param=field.rpartition(" ")[2],
        )


def _max_tokens(prompt: Prompt, options: AnswerOptions, limits: EngineLimits) -> int | None:
    """Returns the limit of an answer, which fits the context and the tier; None: up to the end of
    the context."""
    most = options.entitlement.max_output_tokens
    limit = _context_limit(prompt, options, limits)
    if most is None:
        return limit
    if options.params.min_tokens > most:
        raise InvalidRequestError(
            f"min_tokens ({options.params.min_tokens}) must not exceed {most}, the longest answer "
            f"of tier {options.entitlement.service.tier}.",
            param="min_tokens",
        )
    room = limits.max_model_len - len(prompt.token_ids)
    return min(most, room if limit is None else limit)


def _context_limit(prompt: Prompt, options: AnswerOptions, limits: EngineLimits) -> int | None:
    """Returns the limit of an answer, which fits the context; None: up to the end of the
    context."""
    asked, min_tokens = options.params.max_tokens, options.params.min_tokens
    count, field = len(prompt.token_ids), options.max_tokens_field
    room = limits.max_model_len - count
    if asked is None:
        if options.default_max_tokens is None:
            return None
        max_tokens = min(options.default_max_tokens, room)
        if min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({min_tokens}) must not exceed {field}, which is {max_tokens} by "
                "default for this prompt.",
                param="min_tokens",
            )
        return max_tokens
    if asked > room:
        used = tokens_requested(limits.max_model_len, count, prompt.param, asked)
        raise ContextLengthError(f"{used} {field} must be at most {room} here.", param=field)
    return asked
