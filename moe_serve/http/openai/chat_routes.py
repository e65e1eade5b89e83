"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from moe_serve.http.generation.chat_generation import ChatGeneration, start_chat
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.openai.answers import ResponseHead, collect_chat, written_answer
from moe_serve.http.openai.bodies import ChatBody
from moe_serve.http.openai.chat_format import ChatChunks, chat_response
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.text.tokenizer import Tokenizer


def chat_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=request_body_schema(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        call = read_chat(server, content)
        generation = await start_chat(server, call.chat, call.options, call.internal_id)
        return await answer_chat(server, call, generation, request)

    return router


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A checked request. `ignored` names the fields without effect."""

    body: ChatBody
    chat: Chat
    options: AnswerOptions
    head: ResponseHead
    internal_id: str  # the client sees `head.id`, which it may choose
    ignored: tuple[str, ...]


def read_chat(server: ServerContext, content: Mapping[str, Any]) -> ChatCall:
    """Checks a request. `content` is its parsed body."""
    body = parse_body(ChatBody, content)
    ignored = body.check(is_strict=server.config.is_strict)
    server.model.check_name(body.model)
    chat, internal_id = body.chat(), f"chatcmpl-{uuid.uuid4().hex}"
    unheeded = server.assistant.check(chat, server.model)
    if body.prediction is not None and not server.speculates:
        ignored.append("prediction")
    head = ResponseHead(
        id=f"chatcmpl-{body.request_id}" if body.request_id else internal_id,
        object="chat.completion.chunk" if body.stream else "chat.completion",
        created=int(time.time()),
        model=server.model.name,
        system_fingerprint=server.model.fingerprint,
    )
    return ChatCall(
        body=body,
        chat=chat,
        options=body.options(),
        head=head,
        internal_id=internal_id,
        ignored=(*ignored, *unheeded),
    )


async def answer_chat(
    server: ServerContext, call: ChatCall, generation: ChatGeneration, request: Request
) -> Response:
    """Sends the answer, streamed or complete."""
    body, tokenizer = call.body, server.model.tokenizer
    headers = ignored_header([*call.ignored, *generation.ignored])
    is_forced = server.config.force_include_usage
    has_usage, has_usage_in_chunks = body.stream_usage(is_forced=is_forced)
    token_ids = generation.prompt.token_ids if body.return_token_ids else None
    if body.stream:
        return stream_response(
            generation,
            ChatChunks(
                call.head,
                tokenizer,
                has_usage=has_usage,
                usage_now=generation.usage if has_usage_in_chunks else None,
                prompt_token_ids=token_ids,
            ),
            has_usage=has_usage,
            ping_s=server.config.sse_ping_s,
            headers=headers,
        )
    answer = _answer(generation, call.head, tokenizer, token_ids)
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
