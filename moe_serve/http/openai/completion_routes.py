"""POST /v1/completions, and POST /invocations for chats and completions.

/invocations is the one path that Amazon SageMaker calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.http.generation.chat_generation import start_chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.generation import Generation
from moe_serve.http.generation.prompts import Prompt, completion_prompts, truncated
from moe_serve.http.generation.requests import (
    admit_priority,
    build_engine_requests,
    client_salt,
    resolve_rules,
)
from moe_serve.http.generation.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.openai.answers import ResponseHead, collect, written_answer
from moe_serve.http.openai.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    is_chat,
)
from moe_serve.http.openai.chat_routes import answer_chat, read_chat
from moe_serve.http.openai.completion_format import CompletionFormat, EchoedPrompt, echoed_prompt
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.text.tokenizer import Tokenizer

_MAX_INLINE_TOKENS = 2048


def completion_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=request_body_schema(CompletionBody))
    async def create_completion(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        return await answer_completion(server, content, request)

    @router.post("/invocations", openapi_extra=request_body_schema(ChatBody | CompletionBody))
    async def invoke(request: Request) -> Response:
        """Answers a chat if the body has `messages`, and a completion if it has `prompt`."""
        content = await read_json_object(request, server.config.max_body_bytes)
        if not is_chat(content):
            return await answer_completion(server, content, request)
        call = read_chat(server, content)
        generation = await start_chat(server, call.chat, call.options, call.internal_id)
        return await answer_chat(server, call, generation, request)

    return router


async def answer_completion(
    server: ServerContext, content: Mapping[str, Any], request: Request
) -> Response:
    """Answers a completion, streamed or complete. `content` is the parsed body of the request."""
    body = parse_body(CompletionBody, content)
    headers = ignored_header(body.check(is_strict=server.config.is_strict))
    server.model.check_name(body.model)
    tokenizer = server.model.tokenizer
    options = body.options()
    rules = await resolve_rules(
        server,
        options.params,
        constraint=options.params.constraint,
        constraint_field=options.constraint_field,
    )
    prompts = await _prompts(body, server.model)
    internal_id = f"cmpl-{uuid.uuid4().hex}"
    priority = admit_priority(server, options.priority)
    options = replace(options, cache_salt=client_salt(server, options.cache_salt))
    requests = build_engine_requests(internal_id, prompts, options, rules, server.limits, priority)
    echoes: list[EchoedPrompt | None] = [None] * len(requests)
    if body.echo:
        echoes = await _echoes(prompts, len(requests) // len(prompts), tokenizer)
    head = ResponseHead(
        id=f"cmpl-{body.request_id}" if body.request_id else internal_id,
        object="text_completion",
        created=int(time.time()),
        model=server.model.name,
        system_fingerprint=server.model.fingerprint,
    )
    generation = server.generations.start(
        requests, is_prompt_only=body.is_prompt_only, continues=True
    )
    is_forced = server.config.force_include_usage
    has_usage, has_usage_in_chunks = body.stream_usage(is_forced=is_forced)
    formatter = CompletionFormat(
        head,
        tokenizer,
        echoes,
        has_usage=has_usage,
        usage_now=generation.usage if has_usage_in_chunks else None,
        prompt_ids=_prompt_ids(requests) if body.return_token_ids else None,
        has_prompt_logprobs=body.prompt_logprobs is not None,
    )
    if body.stream:
        return stream_response(
            generation,
            formatter,
            has_usage=has_usage,
            ping_s=server.config.sse_ping_s,
            headers=headers,
        )
    answer = _answer(generation, len(requests), formatter)
    return await whole_response(answer, generation, request, headers)


async def _prompts(body: CompletionBody, model: ServedModel) -> list[Prompt]:
    truncation, max_len = body.truncation, model.max_model_len
    prompts = await completion_prompts(body.prompt, model, has_limit=truncation is None)
    max_tokens = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return [truncated(prompt, truncation, max_len, max_tokens) for prompt in prompts]


def _prompt_ids(requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in requests]


async def _echoes(
    prompts: Sequence[Prompt], num_choices: int, tokenizer: Tokenizer
) -> list[EchoedPrompt | None]:
    def work() -> list[EchoedPrompt | None]:
        echoes = [echoed_prompt(prompt, tokenizer) for prompt in prompts]
        return [echo for echo in echoes for _ in range(num_choices)]

    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return work() if num_tokens <= _MAX_INLINE_TOKENS else await asyncio.to_thread(work)


async def _answer(generation: Generation, num_choices: int, formatter: CompletionFormat) -> bytes:
    choices = await collect(generation, num_choices)
    usage = generation.usage()
    return await written_answer(choices, lambda: formatter.response(choices, usage))
