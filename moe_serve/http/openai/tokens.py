"""The tokens of prompts, without an answer.

POST /tokenize and /detokenize, also under /v1; GET /tokenizer_info, if it is enabled. POST
/v1/chat/completions/render and /v1/completions/render return the prompt as the engine would get it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from pydantic import Field

from moe_serve.errors import InvalidRequestError
from moe_serve.http.generation.chat_request import Truncation
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.prompts import (
    Prompt,
    check_prompt_length,
    completion_prompts,
    render_prompt,
    text_prompt,
    truncated,
)
from moe_serve.http.generation.respond import request_body_schema
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.openai.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    is_chat,
)
from moe_serve.http.schema.field_types import Int, StrictSchema, at_most, parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import check_fields, ignored_header
from moe_serve.http.wire.late_routes import LateRouter

MAX_DETOKENIZED = 262_144  # ids of one request
_MAX_INLINE_TOKENS = 2048
_OWN = frozenset({"add_special_tokens", "return_token_strs"})


class TokenizeBody(StrictSchema):
    """A text to tokenize. A chat is read by `chat_part` instead, so that it accepts a chat's
    fields."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, *, is_strict: bool) -> list[str]:
        return check_fields(self.model_extra or {}, frozenset(), {}, "", is_strict)


class TokenizeChatBody(StrictSchema):
    """The fields of a chat for /tokenize beyond those of a chat."""

    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens must be false with messages: the chat template writes the "
                "special tokens itself.",
                param="add_special_tokens",
                code="unsupported_parameter",
            )


class DetokenizeBody(StrictSchema):
    tokens: Annotated[
        list[Int],
        Field(fail_fast=True, json_schema_extra={"maxItems": MAX_DETOKENIZED}),
        at_most("ids", MAX_DETOKENIZED),
    ]
    model: str | None = None
    skip_special_tokens: bool | None = None

    def check(self, vocab_size: int, *, is_strict: bool) -> list[str]:
        ignored = check_fields(self.model_extra or {}, frozenset(), {}, "", is_strict)
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            wrong = min(self.tokens) if min(self.tokens) < 0 else max(self.tokens)
            raise InvalidRequestError(
                f"tokens: token ids must be in [0, {vocab_size - 1}], got {wrong}.", param="tokens"
            )
        return ignored


def chat_part(content: Mapping[str, Any]) -> ChatBody:
    """Returns the body without the fields that only /tokenize has."""
    own = {*_OWN, "prompt"}
    return parse_body(ChatBody, {name: v for name, v in content.items() if name not in own})


def token_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    is_strict, model = server.config.is_strict, server.model

    @router.post("/tokenize", openapi_extra=request_body_schema(TokenizeBody | ChatBody))
    @router.post("/v1/tokenize", openapi_extra=request_body_schema(TokenizeBody | ChatBody))
    async def tokenize(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        if is_chat(content):
            return await _tokenized_chat(content, server)
        body = parse_body(TokenizeBody, content)
        ignored = body.check(is_strict=is_strict)
        model.check_name(body.model)
        has_special = body.add_special_tokens is not False
        prompt = await text_prompt(body.prompt, model, add_special_tokens=has_special)
        return await _tokens(prompt.token_ids, model, body.return_token_strs, ignored)

    @router.post("/detokenize", openapi_extra=request_body_schema(DetokenizeBody))
    @router.post("/v1/detokenize", openapi_extra=request_body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(DetokenizeBody, content)
        ignored = body.check(server.generations.engine.vocab_size, is_strict=is_strict)
        model.check_name(body.model)
        skips = bool(body.skip_special_tokens)

        def write() -> bytes:
            text = model.tokenizer.decode(body.tokens, skip_special_tokens=skips)
            return msgspec.json.encode({"prompt": text})

        is_small = len(body.tokens) <= _MAX_INLINE_TOKENS
        answer = write() if is_small else await asyncio.to_thread(write)
        return _json(answer, ignored)

    if model.tokenizer_info is not None:
        info = msgspec.json.encode(model.tokenizer_info)

        @router.get("/tokenizer_info")
        async def tokenizer_info() -> Response:
            return Response(info, media_type="application/json")

    return router


async def _tokenized_chat(content: Mapping[str, Any], server: ServerContext) -> Response:
    model = server.model
    own = parse_body(TokenizeChatBody, content)
    own.check()
    body = chat_part(content)
    ignored = body.check(is_strict=server.config.is_strict)
    model.check_name(body.model)
    chat = body.chat()
    ignored = [*ignored, *server.assistant.check(chat, model)]
    prompt = await render_prompt(chat, model)
    return await _tokens(prompt.token_ids, model, own.return_token_strs, ignored)


async def _tokens(
    token_ids: tuple[int, ...], model: ServedModel, has_strs: bool | None, ignored: list[str]
) -> Response:
    def write() -> bytes:
        texts = [model.tokenizer.token_text(token) for token in token_ids] if has_strs else None
        answer = {
            "count": len(token_ids),
            "max_model_len": model.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
        return msgspec.json.encode(answer)

    is_small = len(token_ids) <= _MAX_INLINE_TOKENS
    return _json(write() if is_small else await asyncio.to_thread(write), ignored)


def render_router(server: ServerContext) -> LateRouter:
    router = LateRouter()
    model, config = server.model, server.config

    @router.post("/v1/chat/completions/render", openapi_extra=request_body_schema(ChatBody))
    async def render_chat(request: Request) -> Response:
        content = await read_json_object(request, config.max_body_bytes)
        body = parse_body(ChatBody, content)
        ignored = body.check(is_strict=config.is_strict)
        model.check_name(body.model)
        chat = body.chat()
        ignored = [*ignored, *server.assistant.check(chat, model)]
        max_tokens = body.options().params.max_tokens
        prompts = [await render_prompt(chat, model)]
        (rendered,) = await _rendered(prompts, body.truncation, max_tokens, model)
        return _json(msgspec.json.encode(rendered), ignored)

    @router.post("/v1/completions/render", openapi_extra=request_body_schema(CompletionBody))
    async def render_completion(request: Request) -> Response:
        content = await read_json_object(request, config.max_body_bytes)
        body = parse_body(CompletionBody, content)
        ignored = body.check(is_strict=config.is_strict)
        model.check_name(body.model)
        max_tokens = body.options().params.max_tokens or DEFAULT_COMPLETION_TOKENS
        truncation = body.truncation
        prompts = await completion_prompts(body.prompt, model, has_limit=truncation is None)
        rendered = await _rendered(prompts, truncation, max_tokens, model)
        return _json(msgspec.json.encode(rendered), ignored)

    return router


async def _rendered(
    prompts: Sequence[Prompt],
    truncation: Truncation | None,
    max_tokens: int | None,
    model: ServedModel,
) -> list[dict[str, Any]]:
    """Returns each prompt as the engine would get it. The text is decoded from its tokens."""

    def work() -> list[dict[str, Any]]:
        return [_entry(prompt, model) for prompt in cut]

    max_len = model.max_model_len
    cut = [truncated(prompt, truncation, max_len, max_tokens) for prompt in prompts]
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


def _json(body: bytes, ignored: Sequence[str]) -> Response:
    return Response(body, headers=ignored_header(ignored), media_type="application/json")
