"""Runs a chat for every chat-like route: a ChatBody in, pieces of assistant messages out.

/v1/chat/completions uses it directly. Other routes translate their request into a ChatBody and
write the pieces in their own shape.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from moe_serve.engine.request.request import FinishReason, TokenLogprob
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.http.generation.assistant_formats import forced, led
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.generation import Generation, Usage
from moe_serve.http.generation.prompts import Prompt, chat_prompt, truncated
from moe_serve.http.generation.reasoning_tokens import ReasoningTokens
from moe_serve.http.generation.requests import (
    TokenLimits,
    admit_params,
    admit_priority,
    build_engine_requests,
    check_given_logprobs,
    with_routed_experts,
)
from moe_serve.http.generation.sequence import Piece
from moe_serve.http.metrics.metrics import CallOutcome
from moe_serve.http.schema.schemas import ChatBody
from moe_serve.text.assistant.delta import NOTHING, AssistantDelta, joined
from moe_serve.text.assistant.parser import AssistantParser

TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPiece:
    """The new part of one choice. `raw` has its tokens and its text before parsing.

    `finish_reason` is set on the choice's last piece: a value of FinishReason, or "tool_calls" in
    place of "stop" when the message has calls and all of them are complete. `has_cut_call`: the
    text ended within a call, at a limit or a stop string.
    """

    raw: Piece
    delta: AssistantDelta
    finish_reason: str | None = None
    has_cut_call: bool = False

    @property
    def index(self) -> int:
        return self.raw.index

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.raw.delta.token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.raw.delta.logprobs

    @property
    def stop_reason(self) -> str | int | None:
        return self.raw.delta.stop_reason

    @property
    def num_logprobs(self) -> int:
        return self.raw.num_logprobs


class ChatGeneration:
    """Yields the new pieces of all choices as they arrive; `close` aborts what still runs.

    `hides_reasoning`: the reasoning is generated and counted, but not shown. `echoed` is put in
    front of each choice's content. `ignored` names the request's fields that have no effect with
    this model.
    """

    def __init__(
        self,
        generation: Generation,
        prompt: Prompt,
        parsers: Sequence[AssistantParser],
        *,
        hides_reasoning: bool = False,
        echoed: str = "",
        ignored: Sequence[str] = (),
        count_outcome: Callable[[CallOutcome], None] | None = None,
        markers: ThinkingMarkers | None = None,
    ) -> None:
        """`count_outcome` is called once for each message; None: calls are not parsed. `markers`
        enclose the reasoning; None: the answer has no reasoning."""
        self._thoughts = ReasoningTokens(markers, len(parsers))
        self.prompt = prompt
        self.ignored = ignored
        self._echoed = dict.fromkeys(range(len(parsers)), echoed) if echoed else {}
        self.num_choices = len(parsers)
        self._hides_reasoning = hides_reasoning
        self._generation = generation
        self._parsers = parsers
        self._count_outcome = count_outcome
        self._has_calls = [False] * len(parsers)

    async def __aiter__(self) -> AsyncIterator[list[ChatPiece]]:
        async for pieces in self._generation:
            yield [self._parsed(piece) for piece in pieces]

    @property
    def is_ended(self) -> bool:
        """True if no more pieces will come."""
        return self._generation.is_ended

    def take(self) -> list[ChatPiece]:
        """The pieces that are ready, possibly none."""
        return [self._parsed(piece) for piece in self._generation.take()]

    def listen(self, on_step: Callable[[], bool]) -> None:
        """Registers a callback for each step, which should call `take`. See `DeltaQueue.listen`."""
        self._generation.listen(on_step)

    def usage(self) -> Usage:
        return replace(self._generation.usage(), reasoning_tokens=self._thoughts.total)

    def close(self) -> None:
        """Aborts what still runs. It is safe to call after the end, or twice."""
        self._generation.close()

    def _parsed(self, piece: Piece) -> ChatPiece:
        parser, reason = self._parsers[piece.index], piece.delta.finish_reason
        self._thoughts.read(piece.index, piece.delta.token_ids)
        delta = parser.push(piece.delta.text) if piece.delta.text else NOTHING
        if reason is not None:
            delta = joined(delta, parser.finish(is_cut=_is_cut(piece)))
        if piece.index in self._echoed:
            delta = replace(delta, content=self._echoed.pop(piece.index) + delta.content)
        if delta.reasoning and self._hides_reasoning:
            delta = replace(delta, reasoning="")
        if delta.calls:
            self._has_calls[piece.index] = True
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_whole and self._count_outcome is not None:
            self._count_outcome(_outcome(parser, has_calls=self._has_calls[piece.index]))
        name = None if reason is None else reason.value
        has_cut_call = reason is not None and parser.has_cut_call
        if reason is FinishReason.STOP and self._has_calls[piece.index] and not has_cut_call:
            name = TOOL_CALLS
        return ChatPiece(raw=piece, delta=delta, finish_reason=name, has_cut_call=has_cut_call)


def _is_cut(last: Piece) -> bool:
    """True if a limit or a stop condition ended the answer, not the model itself."""
    is_stopped = last.delta.stop_reason is not None
    return is_stopped or last.delta.finish_reason is FinishReason.LENGTH


def _outcome(parser: AssistantParser, *, has_calls: bool) -> CallOutcome:
    """The result of parsing a finished message for calls."""
    if parser.has_spoilt_call:
        return "malformed"
    return "calls" if has_calls else "none"


async def start_chat(server: ServerContext, body: ChatBody, response_id: str) -> ChatGeneration:
    """Renders, tokenizes and submits a checked body. The caller must `close` the result."""
    model, tokenizer = server.model, server.model.tokenizer
    ignored = server.assistant.check(body, model)
    if body.has_displaced_format:
        body = body.without_format()
        ignored.append("response_format")
    params = body.sampling_params()
    prompt = await chat_prompt(body, model)
    plan = server.assistant.plan(body, prompt.text or "")
    is_forced, special = body.forces_call, tokenizer.special_ids
    shaped = forced(params, body, plan, special) if is_forced else led(params, plan, special)
    shaped = server.assistant.limited(shaped, body, prompt.text or "", tokenizer)
    markers = server.assistant.thinking_markers(shaped, body, prompt.text or "", tokenizer)
    params = await admit_params(server, shaped, "tools" if is_forced else body.constraint()[1])
    limit, max_len = body.truncate_prompt_tokens, model.max_model_len
    prompt = truncated(prompt, limit, max_len, params.max_tokens or 1, body.truncation_side)
    limits = TokenLimits(
        max_model_len=max_len,
        vocab_size=server.generations.engine.vocab_size,
        default_max_tokens=None,
        max_tokens_field=body.max_tokens_field,
    )
    salt, priority = body.cache_salt or "", admit_priority(server, body.priority)
    requests = build_engine_requests(response_id, [prompt], params, limits, salt, priority)
    check_given_logprobs(requests, max_len, is_streamed=bool(body.stream))
    requests = with_routed_experts(requests, body, server)
    kept_ids = frozenset(special[marker] for marker in plan.markers if marker in special)
    return ChatGeneration(
        server.generations.start(
            requests, kept_ids=kept_ids, continues=bool(body.continue_final_message)
        ),
        prompt,
        [plan.make() for _ in requests],
        hides_reasoning=body.include_reasoning is False,
        echoed=body.echoed,
        ignored=ignored,
        count_outcome=server.metrics.count_parsed_message if plan.looks_for_calls else None,
        markers=markers,
    )
