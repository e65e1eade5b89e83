"""POST /v1/completions, with and without echo, and POST /invocations for chats and completions.

/invocations is the one path that Amazon SageMaker calls.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import Request, Response

from moe_serve.engine.request.request import GenerationRequest, TokenLogprob
from moe_serve.http.generation.answer_sequence import Piece
from moe_serve.http.generation.chat_generation import start_chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.generation import Generation
from moe_serve.http.generation.logprob_format import (
    completion_logprobs,
    prompt_logprobs,
    routed_fields,
    routed_json,
)
from moe_serve.http.generation.prompts import Prompt, completion_prompts, truncated
from moe_serve.http.generation.requests import (
    admit_priority,
    build_engine_requests,
    client_salt,
    resolve_rules,
    with_entitlement,
)
from moe_serve.http.generation.respond import request_body_schema, stream_response, whole_response
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.answers import (
    Choice,
    ChunkWriter,
    ResponseHead,
    collect,
    timing_fields,
    usage_fields,
    written_answer,
)
from moe_serve.http.openai.bodies import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    is_chat,
)
from moe_serve.http.openai.chat_routes import answer_chat, read_chat
from moe_serve.http.schema.field_types import parse_body
from moe_serve.http.schema.json_body import read_json_object
from moe_serve.http.schema.parameters import ignored_header
from moe_serve.http.wire.late_routes import LateRouter
from moe_serve.text.detokenizer import make_detokenizer
from moe_serve.text.text_stream import TextDelta
from moe_serve.text.tokenizer import Tokenizer

_MAX_INLINE_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt as the answer repeats it. `text_offsets` has the start of each token's text."""

    text: str
    token_ids: tuple[int, ...]
    text_offsets: tuple[int, ...]


def echoed_prompt(prompt: Prompt, tokenizer: Tokenizer) -> EchoedPrompt:
    """Detokenizes the prompt. A long prompt should be processed off the event loop."""
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=prompt.text is not None)
    offsets: list[int] = []
    parts: list[str] = []
    num_chars = 0
    for token_id in prompt.token_ids:
        offsets.append(num_chars)
        parts.append(detokenizer.push(token_id))
        num_chars += len(parts[-1])
    parts.append(detokenizer.flush())
    text = "".join(parts) if prompt.text is None else prompt.text
    return EchoedPrompt(text=text, token_ids=prompt.token_ids, text_offsets=tuple(offsets))


class CompletionFormat:
    """Writes one answer. `echoes` has the prompt of each choice, or None without echo.

    `prompt_ids` has the token ids of each choice's prompt, if the answer returns token ids.
    `has_prompt_logprobs`: prompt logprobs are a field of each choice, not part of an echo.
    """

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        echoes: Sequence[EchoedPrompt | None],
        *,
        has_usage: bool = False,
        usage_now: Callable[[], Usage] | None = None,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        has_prompt_logprobs: bool = False,
    ) -> None:
        self._prompt_ids = prompt_ids
        self._has_prompt_logprobs = has_prompt_logprobs
        self._head = head
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._writer = ChunkWriter(head, has_usage=has_usage, usage_now=usage_now)
        self._started: set[int] = set()

    def events(self, piece: Piece) -> bytes:
        """Returns the events for a piece: text, then the finish reason."""
        delta, events = piece.delta, []
        self._writer.count(len(delta.token_ids))
        echo, ids = None, self._new_ids(piece)
        if piece.index not in self._started:
            self._started.add(piece.index)
            echo = self._echoes[piece.index]
        text = (echo.text if echo else "") + delta.text
        logprobs = self._delta_logprobs(piece, echo)
        others = ids + routed_json(delta.routed_experts, delta.token_ids, self._tokenizer)
        if text or logprobs is not None or others:
            events.append(self._chunk(piece.index, text, logprobs, None, others))
        if delta.finish_reason is not None:
            events.append(self._chunk(piece.index, "", None, delta))
        return b"".join(events)

    def _new_ids(self, piece: Piece) -> bytes:
        """Fields with token ids: the new ones, and those of the prompt in the first chunk."""
        if self._prompt_ids is None or not piece.delta.token_ids:
            return b""
        ids = b',"token_ids":' + msgspec.json.encode(piece.delta.token_ids)
        if piece.index in self._started:
            return ids
        return ids + b',"prompt_token_ids":' + msgspec.json.encode(self._prompt_ids[piece.index])

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage)

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Returns the complete answer as one object."""
        content = {
            **self._head.fields(),
            "choices": [self._choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_fields(usage),
            **timing_fields(usage),
        }
        return msgspec.json.encode(content)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.finish_reason is not None, "a collected choice has a finish reason"
        echo = self._echoes[index]
        prompt_entries = None if self._has_prompt_logprobs else choice.prompt_logprobs
        has_logprobs = choice.logprobs is not None or prompt_entries is not None
        logprobs = None
        # encoded at once: as Python objects all choices would take too much memory
        if has_logprobs:
            fields = self._logprobs(
                choice.token_ids,
                choice.logprobs or (),
                choice.text_offsets,
                echo,
                prompt_entries,
            )
            logprobs = msgspec.Raw(msgspec.json.encode(fields))
        return {
            "index": index,
            "text": (echo.text if echo else "") + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason.value,
            "stop_reason": choice.stop_reason,
            **self._routed(choice),
            **self._more_fields(index, choice),
        }

    def _routed(self, choice: Choice) -> dict[str, msgspec.Raw]:
        if choice.routed_experts is None:
            return {}
        return routed_fields(choice.routed_experts, choice.token_ids, self._tokenizer)

    def _more_fields(self, index: int, choice: Choice) -> dict[str, Any]:
        """Fields of a complete choice that only some requests ask for."""
        fields: dict[str, Any] = {}
        if self._prompt_ids is not None:
            fields["prompt_token_ids"] = self._prompt_ids[index]
            fields["token_ids"] = choice.token_ids
        if self._has_prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self._tokenizer)
        return fields

    def _delta_logprobs(self, piece: Piece, echo: EchoedPrompt | None) -> dict[str, Any] | None:
        delta = piece.delta
        if delta.logprobs is None and piece.prompt_logprobs is None:
            return None
        if echo is None and not delta.token_ids:
            return None
        shift = len(full.text) if (full := self._echoes[piece.index]) and echo is None else 0
        offsets = [shift + offset for offset in delta.text_offsets]
        return self._logprobs(
            delta.token_ids, delta.logprobs or (), offsets, echo, piece.prompt_logprobs
        )

    def _logprobs(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprob],
        text_offsets: Sequence[int],
        echo: EchoedPrompt | None,
        prompt_entries: Sequence[TokenLogprob | None] | None,
    ) -> dict[str, Any]:
        """Returns the logprobs of the echoed prompt, if asked for, and of the generated tokens."""
        if echo is None or prompt_entries is None:
            return completion_logprobs(token_ids, entries, text_offsets, self._tokenizer)
        shift = len(echo.text)
        return completion_logprobs(
            [*echo.token_ids, *token_ids],
            [*prompt_entries, *entries],
            [*echo.text_offsets, *(shift + offset for offset in text_offsets)],
            self._tokenizer,
        )

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None,
        end: TextDelta | None,
        others: bytes = b"",
    ) -> bytes:
        reason, stop = b"null", b""
        if end is not None:
            reason = msgspec.json.encode(end.finish_reason)
            stop = b',"stop_reason":' + msgspec.json.encode(end.stop_reason)
        encoded = b"null" if logprobs is None else msgspec.json.encode(logprobs)
        return self._writer.choice(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b%b}'
            % (index, msgspec.json.encode(text), encoded, reason, stop, others)
        )


def completion_router(server: ServerContext) -> LateRouter:
    router = LateRouter()

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
        call = await read_chat(server, content, request.headers)
        generation = await start_chat(server, call.chat, call.options, call.internal_id)
        return await answer_chat(server, call, generation, request)

    return router


async def answer_completion(
    server: ServerContext, content: Mapping[str, Any], request: Request
) -> Response:
    """Answers a completion, streamed or complete. `content` is the parsed body of the request."""
    body = parse_body(CompletionBody, content)
    ignored = body.check(is_strict=server.config.is_strict)
    named, tokenizer = await server.model.named(body.model), server.model.tokenizer
    options = with_entitlement(server, body.options(), request.headers)
    rules = await resolve_rules(
        server,
        options.params,
        constraint=options.params.constraint,
        constraint_field=options.constraint_field,
    )
    prompts = await _prompts(body, server.model)
    internal_id = f"cmpl-{uuid.uuid4().hex}"
    priority = admit_priority(server, options.priority)
    salt = client_salt(server, options.cache_salt)
    options = replace(options, cache_salt=salt, adapter=named.adapter)
    requests = build_engine_requests(internal_id, prompts, options, rules, server.limits, priority)
    echoes: list[EchoedPrompt | None] = [None] * len(requests)
    if body.echo:
        echoes = await _echoes(prompts, len(requests) // len(prompts), tokenizer)
    head = ResponseHead(
        id=f"cmpl-{body.request_id}" if body.request_id else internal_id,
        object="text_completion",
        created=int(time.time()),
        model=named.name,
        system_fingerprint=named.fingerprint,
        service_tier=options.entitlement.shown_tier,
    )
    generation = server.generations.start(
        requests, is_prompt_only=body.is_prompt_only, continues=True
    )
    headers = {**ignored_header(options.entitlement.unheeded(ignored)), **generation.headers}
    has_usage, has_usage_in_chunks = body.stream_usage(is_forced=server.config.force_include_usage)
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
