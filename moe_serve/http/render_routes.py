"""POST /v1/chat/completions/render and /v1/completions/render: the prompt, and no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from moe_serve.http.body import read_json_object
from moe_serve.http.context import ServerContext
from moe_serve.http.parameters import ignored_header
from moe_serve.http.prompts import (
    Prompt,
    chat_prompt,
    check_prompt_length,
    completion_prompts,
    truncated,
)
from moe_serve.http.respond import request_body_schema
from moe_serve.http.schemas import DEFAULT_COMPLETION_TOKENS, ChatBody, CompletionBody
from moe_serve.http.served_model import ServedModel
from moe_serve.http.strict_schema import parse_body

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
        limit = body.truncate_prompt_tokens
        (rendered,) = await _rendered(prompts, limit, max_tokens, model)
        return _json(rendered, ignored)

    @router.post("/v1/completions/render", openapi_extra=request_body_schema(CompletionBody))
    async def render_completion(request: Request) -> Response:
        content = await read_json_object(request, config.max_body_bytes)
        body = parse_body(CompletionBody, content)
        ignored = body.check(is_strict=config.is_strict)
        model.check_name(body.model)
        max_tokens = body.sampling_params().max_tokens or DEFAULT_COMPLETION_TOKENS
        limit = body.truncate_prompt_tokens
        prompts = await completion_prompts(body.prompt, model, has_limit=limit is None)
        return _json(await _rendered(prompts, limit, max_tokens, model), ignored)

    return router


async def _rendered(
    prompts: Sequence[Prompt], limit: int | None, max_tokens: int | None, model: ServedModel
) -> list[dict[str, Any]]:
    """Each prompt as the engine would get it; its text as its tokens say."""

    def work() -> list[dict[str, Any]]:
        return [_entry(prompt, model) for prompt in cut]

    cut = [truncated(prompt, limit, model.max_model_len, max_tokens or 1) for prompt in prompts]
    for prompt in cut:
        check_prompt_length(len(prompt.token_ids), prompt.param, model.max_model_len)
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
