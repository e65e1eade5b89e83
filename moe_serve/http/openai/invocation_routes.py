"""POST /invocations: serves chats and completions at the one path that Amazon SageMaker calls."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.respond import request_body_schema
from moe_serve.http.openai.chat_routes import answer_chat
from moe_serve.http.openai.completion_routes import answer_completion
from moe_serve.http.openai.token_bodies import is_chat
from moe_serve.http.schema.body import read_json_object
from moe_serve.http.schema.schemas import ChatBody, CompletionBody


def invocation_router(server: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/invocations", openapi_extra=request_body_schema(ChatBody | CompletionBody))
    async def invoke(request: Request) -> Response:
        """Answers a chat if the body has `messages`, and a completion if it has `prompt`."""
        content = await read_json_object(request, server.config.max_body_bytes)
        answer = answer_chat if is_chat(content) else answer_completion
        return await answer(server, content, request)

    return router
