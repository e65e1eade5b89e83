"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request, Response

from moe_serve.http.answer import collect, written_answer
from moe_serve.http.body import read_json_object
from moe_serve.http.chat_format import ChatChunks, chat_response
from moe_serve.http.chunk_format import ResponseHead
from moe_serve.http.context import ServerContext
from moe_serve.http.engine_requests import TokenLimits, build_engine_requests
from moe_serve.http.generation import Generation
from moe_serve.http.parameters import ignored_header
from moe_serve.http.prompts import chat_prompt
from moe_serve.http.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.schemas import ChatBody, parse_body
from moe_serve.text.tokenizer import Tokenizer


def chat_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=request_body_schema(ChatBody))
    async def create_chat_completion(request: Request) -> Response:
        content = await read_json_object(request, server.config.max_body_bytes)
        body = parse_body(ChatBody, content)
        headers = ignored_header(body.check(is_strict=server.config.is_strict))
        server.model.check_name(body.model)
        params = body.sampling_params()
        prompt = await chat_prompt(body, server.model)
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        limits = TokenLimits(
            max_model_len=server.model.max_model_len,
            vocab_size=server.generations.engine.vocab_size,
            default_max_tokens=None,
            max_tokens_field=body.max_tokens_field,
        )
        salt = body.cache_salt or ""
        requests = build_engine_requests(response_id, [prompt], params, limits, salt)
        head = ResponseHead(
            id=response_id,
            object="chat.completion.chunk" if body.stream else "chat.completion",
            created=int(time.time()),
            model=server.model.name,
        )
        tokenizer = server.model.tokenizer
        generation = server.generations.start(requests)
        if body.stream:
            return stream_response(
                generation,
                ChatChunks(head, tokenizer, has_usage=body.has_usage_chunk),
                has_usage=body.has_usage_chunk,
                ping_s=server.config.sse_ping_s,
                headers=headers,
            )
        answer = _answer(generation, len(requests), head, tokenizer)
        return await whole_response(answer, generation, request, headers)

    return router


async def _answer(
    generation: Generation, num_choices: int, head: ResponseHead, tokenizer: Tokenizer
) -> bytes:
    choices = await collect(generation, num_choices)
    usage = generation.usage()
    return await written_answer(choices, lambda: chat_response(head, choices, usage, tokenizer))
