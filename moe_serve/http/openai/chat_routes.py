"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from moe_serve.http.generation.chat_generation import ChatGeneration, start_chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.openai.answers import collect_chat, written_answer
from moe_serve.http.openai.chat_format import ChatChunks, chat_response
from moe_serve.http.openai.chunk_format import ResponseHead
from moe_serve.http.schema.body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.schema.schemas import ChatBody
from moe_serve.http.schema.strict_schema import parse_body
from moe_serve.text.tokenizer import Tokenizer


def chat_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=request_body_schema(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        return await answer_chat(server, content, request)

    return router


async def answer_chat(
    server: ServerContext, content: Mapping[str, Any], request: Request
) -> Response:
    """Answers a chat, streamed or complete. `content` is the parsed body of the request."""
    body = parse_body(ChatBody, content)
    ignored = body.check(is_strict=server.config.is_strict)
    server.model.check_name(body.model)
    internal_id = f"chatcmpl-{uuid.uuid4().hex}"
    head = ResponseHead(
        id=f"chatcmpl-{body.request_id}" if body.request_id else internal_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        created=int(time.time()),
        model=server.model.name,
        system_fingerprint=server.model.fingerprint,
    )
    tokenizer = server.model.tokenizer
    generation = await start_chat(server, body, internal_id)
    headers = ignored_header([*ignored, *generation.ignored])
    is_forced = server.config.force_include_usage
    has_usage, has_usage_in_chunks = body.stream_usage(is_forced=is_forced)
    token_ids = generation.prompt.token_ids if body.return_token_ids else None
    if body.stream:
        return stream_response(
            generation,
            ChatChunks(
                head,
                tokenizer,
                has_usage=has_usage,
                usage_now=generation.usage if has_usage_in_chunks else None,
                prompt_token_ids=token_ids,
            ),
            has_usage=has_usage,
            ping_s=server.config.sse_ping_s,
            headers=headers,
        )
    answer = _answer(generation, head, tokenizer, token_ids)
    return await whole_response(answer, generation, request, headers)


async def _answer(
    generation: ChatGeneration,
    head: ResponseHead,
    tokenizer: Tokenizer,
    prompt_token_ids: tuple[int, ...] | None,
) -> bytes:
    choices = await collect_chat(generation)
    usage = generation.usage()
    raw = [choice.raw for choice in choices]

    def write() -> bytes:
        return chat_response(head, choices, usage, tokenizer, prompt_token_ids)

    return await written_answer(raw, write)
