"""POST /v1/chat/completions/render and /v1/completions/render return the prompt without an
answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import (
    Prompt,
    chat_prompt,
    check_prompt_length,
    completion_prompts,
    truncated,
)
from moe_serve.http.generation.respond import request_body_schema
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.schema.body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.schema.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from moe_serve.http.schema.strict_schema import parse_body

_MAX_INLINE_TOKENS = 2048


def render_router(server: ServerContext) -> APIRouter:
    router = APIRouter()
    model, config = server.model, server.config

    @router.post("/v1/chat/completions/render", openapi_extra=request_body_schema(ChatBody))
    async def render_chat(request: Request) -> Response:
        content = await read_json_object(request, config.max_body_bytes)
        body = parse_body(ChatBody, content)
        ignored = body.check(is_strict=config.is_strict)
        model.check_name(body.model)
        ignored = [*ignored, *server.assistant.check(body, model)]
        max_tokens = body.sampling_params().max_tokens
        prompts = [await chat_prompt(body, model)]
        (rendered,) = await _rendered(prompts, body, max_tokens, model)
        return _json(rendered, ignored)

    @router.post("/v1/completions/render", openapi_extra=request_body_schema(CompletionBody))
    async def render_completion(request: Request) -> Response:
        content = await read_json_object(request, config.max_body_bytes)
        body = parse_body(CompletionBody, content)
        ignored = body.check(is_strict=config.is_strict)
        model.check_name(body.model)
        max_tokens = body.sampling_params().max_tokens or DEFAULT_COMPLETION_TOKENS
        has_limit = body.truncate_prompt_tokens is None
        prompts = await completion_prompts(body.prompt, model, has_limit=has_limit)
        return _json(await _rendered(prompts, body, max_tokens, model), ignored)

    return router


async def _rendered(
    prompts: Sequence[Prompt], body: GenerationBody, max_tokens: int | None, model: ServedModel
) -> list[dict[str, Any]]:
    """Each prompt as the engine would get it. The text is decoded from its tokens."""

    def work() -> list[dict[str, Any]]:
        return [_entry(prompt, model) for prompt in cut]

    limit, side = body.truncate_prompt_tokens, body.truncation_side
    max_len = model.max_model_len
    cut = [truncated(prompt, limit, max_len, max_tokens or 1, side) for prompt in prompts]
    for prompt in cut:
        check_prompt_length(len(prompt.token_ids), prompt.param, max_len)
    num_tokens = sum(len(prompt.token_ids) for prompt in cut)
    return work() if num_tokens <= _MAX_INLINE_TOKENS else await asyncio.to_thread(work)


def _entry(prompt: Prompt, model: ServedModel) -> dict[str, Any]:
    text = model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return {
        "model": model.name,
        "prompt": text,
        "token_ids": prompt.token_ids,
        "count": len(prompt.token_ids),
        "max_model_len": model.max_model_len,
    }


def _json(content: Any, ignored: Sequence[str]) -> Response:
    body = msgspec.json.encode(content)
    return Response(body, headers=ignored_header(ignored), media_type="application/json")
