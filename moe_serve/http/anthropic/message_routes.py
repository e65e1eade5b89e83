"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from moe_serve.errors import ContextLengthError
from moe_serve.http.anthropic.message_answer import PATH, STYLE, MessageRun
from moe_serve.http.anthropic.message_body import CountTokensBody, MessagesBody
from moe_serve.http.anthropic.message_chat import (
    OWN_IGNORED,
    OWN_NAMES,
    TranslatedMessages,
    translate,
)
from moe_serve.http.generation.chat_fields import own_ignored, renamed_fields
from moe_serve.http.generation.chat_generation import ChatGeneration, start_chat
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import render_prompt
from moe_serve.http.generation.respond import SseResponse, request_body_schema, whole_response
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header


def messages_router(server: ServerContext) -> APIRouter:
    router = APIRouter(prefix=PATH)
    is_strict = server.config.is_strict

    def translated_body(body: CountTokensBody) -> TranslatedMessages:
        has_reasoning = server.assistant.reasoning is not None
        return translate(body, is_strict=is_strict, has_reasoning=has_reasoning)

    @router.post("", openapi_extra=request_body_schema(MessagesBody))
    async def create_message(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(MessagesBody, content)
        translated = translated_body(body)
        server.model.check_name(body.model)
        message_id = f"msg_{uuid.uuid4().hex}"
        with _own_words():
            unheeded = server.assistant.check(translated.chat, server.model)
            options = translated.options(is_streamed=body.stream)
            chat, is_cut = await _start(server, translated.chat, options, message_id)
        run = MessageRun(message_id, server.model.name, chat, is_cut_by_context=is_cut)
        of_chat = own_ignored([*unheeded, *chat.ignored], OWN_IGNORED)
        headers = ignored_header([*translated.ignored, *of_chat])
        if body.stream:
            ping_s = server.config.sse_ping_s
            return SseResponse(
                run.events(), ping_s=ping_s, on_close=chat.close, headers=headers, style=STYLE
            )
        return await whole_response(_whole(run), chat, request, headers)

    @router.post("/count_tokens", openapi_extra=request_body_schema(CountTokensBody))
    async def count_tokens(request: Request, response: Response) -> dict[str, Any]:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(CountTokensBody, content)
        translated = translated_body(body)
        server.model.check_name(body.model)
        with _own_words():
            unheeded = server.assistant.check(translated.chat, server.model)
            ignored = [*translated.ignored, *own_ignored(unheeded, OWN_IGNORED)]
            response.headers.update(ignored_header(ignored))
            prompt = await render_prompt(translated.chat, server.model)
        return {"input_tokens": len(prompt.token_ids)}

    return router


@contextmanager
def _own_words() -> Iterator[None]:
    """Rewrites errors of the chat in the field names and wording of Anthropic's API."""
    try:
        with renamed_fields(OWN_NAMES):
            yield
    except ContextLengthError as error:
        if error.num_prompt_tokens is None:
            raise
        count, limit = error.num_prompt_tokens, error.max_prompt_tokens
        words = f"prompt is too long: {count} tokens > {limit} maximum"
        raise error.reworded(words, error.param) from error


async def _start(
    server: ServerContext, chat: Chat, options: AnswerOptions, message_id: str
) -> tuple[ChatGeneration, bool]:
    """Starts the chat; returns it, and True if the context has less room than max_tokens.

    Clients of this API must send max_tokens, and send values meant for models with long contexts.
    If the value does not fit, the answer may use the rest of the context.
    """
    try:
        return await start_chat(server, chat, options, message_id, splits_runs=True), False
    except ContextLengthError as error:
        if error.param != options.max_tokens_field:
            raise
    to_the_end = replace(options, params=replace(options.params, max_tokens=None))
    return await start_chat(server, chat, to_the_end, message_id, splits_runs=True), True


async def _whole(run: MessageRun) -> bytes:
    async for _ in run.events():
        continue
    return msgspec.json.encode(run.result)
