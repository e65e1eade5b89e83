"""Runs the chats of all routes: takes a `Chat` and yields pieces of assistant messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenLogprob
from moe_serve.engine.request.thinking_markers import ThinkingMarkers
from moe_serve.engine.request.thought_counter import ThoughtCounter
from moe_serve.engine.sampling.thinking_limit import counting_markers, limiting_markers
from moe_serve.http.generation.answer_sequence import Piece
from moe_serve.http.generation.assistant_formats import answer_constraint
from moe_serve.http.generation.chat_request import AnswerOptions, Chat
from moe_serve.http.generation.context import ServerContext
from moe_serve.http.generation.generation import Generation
from moe_serve.http.generation.prompts import Prompt, predicted_tokens, render_prompt, truncated
from moe_serve.http.generation.requests import (
    admit_priority,
    build_engine_requests,
    client_salt,
    resolve_rules,
)
from moe_serve.http.generation.usage import Usage
from moe_serve.http.metrics.metrics import CallOutcome
from moe_serve.http.schema.structured import is_response_format
from moe_serve.text.assistant.formats import ParserPlan
from moe_serve.text.assistant.outbox import NOTHING, AssistantDelta, joined
from moe_serve.text.assistant.parser import AssistantParser
from moe_serve.text.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"
_NO_BUDGET = 2**62


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedChat:
    """The engine's requests for a chat, and the parsing of their answers.

    `markers` enclose the reasoning; None if the answer has none. `ignored` names the fields that
    have no effect.
    """

    requests: list[GenerationRequest]
    prompt: Prompt
    plan: ParserPlan
    markers: ThinkingMarkers | None
    ignored: tuple[str, ...]
    has_prediction: bool = False  # the usage then says how much of it was accepted


class ReasoningTokens:
    """Counts the tokens between the markers, as a thinking budget does.

    The count depends on the tokens alone, not on how they are grouped into pieces. It is the same
    whether the answer shows the reasoning, hides it, or keeps it in the content.
    """

    def __init__(self, markers: ThinkingMarkers | None, num_choices: int) -> None:
        """With `markers` None the answers have no reasoning."""
        self._counters: list[ThoughtCounter] = []
        self._tokens: list[list[int]] = []
        if markers is not None:
            self._counters = [ThoughtCounter(markers, _NO_BUDGET, 0) for _ in range(num_choices)]
            self._tokens = [[] for _ in range(num_choices)]

    @property
    def total(self) -> int:
        """The reasoning tokens of all choices so far."""
        return sum(counter.num_spent for counter in self._counters)

    def read(self, index: int, token_ids: Sequence[int]) -> None:
        """Adds the new tokens of one choice."""
        if not self._counters or self._counters[index].is_over:
            return
        self._tokens[index] += token_ids
        self._counters[index].read(self._tokens[index])


class ChatGeneration:
    """Yields the new pieces of all choices as they arrive; `close` aborts what still runs."""

    def __init__(
        self,
        generation: Generation,
        chat: Chat,
        resolved: ResolvedChat,
        count_outcome: Callable[[CallOutcome], None],
    ) -> None:
        """`count_outcome` is called once for each message that is parsed for calls."""
        self.prompt, self.ignored = resolved.prompt, resolved.ignored
        self.num_choices = len(resolved.requests)
        self._thoughts = ReasoningTokens(resolved.markers, self.num_choices)
        self._has_prediction = resolved.has_prediction
        self._echoed = dict.fromkeys(range(self.num_choices), chat.echoed) if chat.echoed else {}
        self._hides_reasoning = not chat.shows_reasoning  # it is generated and counted nevertheless
        self._generation = generation
        self.headers = generation.headers
        self._parsers = [resolved.plan.make() for _ in resolved.requests]
        self._count_outcome = count_outcome if resolved.plan.looks_for_calls else None
        self._has_calls = [False] * self.num_choices

    async def __aiter__(self) -> AsyncIterator[list[ChatPiece]]:
        async for pieces in self._generation:
            yield [self._parsed(piece) for piece in pieces]

    @property
    def is_ended(self) -> bool:
        """True if no more pieces will come."""
        return self._generation.is_ended

    def take(self) -> list[ChatPiece]:
        """Returns the pieces that are ready, possibly none."""
        return [self._parsed(piece) for piece in self._generation.take()]

    def listen(self, on_step: Callable[[], bool]) -> None:
        """Registers a callback for each step, which should call `take`. See `DeltaQueue.listen`."""
        self._generation.listen(on_step)

    def usage(self) -> Usage:
        return replace(
            self._generation.usage(),
            reasoning_tokens=self._thoughts.total,
            prediction=self._generation.prediction_usage() if self._has_prediction else None,
        )

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
    """Returns True if a limit or a stop condition ended the answer, not the model itself."""
    is_stopped = last.delta.stop_reason is not None
    return is_stopped or last.delta.finish_reason is FinishReason.LENGTH


def _outcome(parser: AssistantParser, *, has_calls: bool) -> CallOutcome:
    """Returns the result of parsing a finished message for calls."""
    if parser.has_spoilt_call:
        return "malformed"
    return "calls" if has_calls else "none"


async def start_chat(
    server: ServerContext,
    chat: Chat,
    options: AnswerOptions,
    response_id: str,
    *,
    splits_runs: bool = False,
) -> ChatGeneration:
    """Starts the answers to a chat. The caller must `close` the result.

    `splits_runs`: tokens that came together are parsed one by one, for an API whose answers keep
    the order of text and calls.
    """
    prompt = await render_prompt(chat, server.model)
    resolved = await resolve_chat(server, chat, options, prompt, response_id)
    generation = server.generations.start(
        resolved.requests,
        kept_ids=_kept_ids(resolved.plan, server.model.tokenizer),
        continues=chat.continues,
        splits_runs=splits_runs,
    )
    count_outcome = server.metrics.count_parsed_message
    return ChatGeneration(generation, chat, resolved, count_outcome)


async def resolve_chat(
    server: ServerContext, chat: Chat, options: AnswerOptions, prompt: Prompt, response_id: str
) -> ResolvedChat:
    """Turns a chat and the user's options into requests for this model."""
    model, params, text = server.model, options.params, prompt.text or ""
    own, field = params.constraint, options.constraint_field
    is_displaced = chat.forces_call and is_response_format(field)
    if is_displaced:  # the call takes the place of an answer in a response_format
        own = None
    if chat.forces_call:
        field = "tools"
    plan, reasoning = server.assistant.plan(chat, own, text), server.assistant.reasoning_of(chat)
    constraint = answer_constraint(chat, own, plan, model.tokenizer.special_ids)
    can_call = bool(chat.called_tools)
    thinking = limiting_markers(
        params, constraint, reasoning, text, model.tokenizer, can_call=can_call
    )
    markers = thinking or counting_markers(constraint, reasoning, text, model.tokenizer)
    rules = await resolve_rules(
        server, params, constraint=constraint, constraint_field=field, thinking=thinking
    )
    prompt = truncated(prompt, chat.truncation, model.max_model_len, params.max_tokens)
    priority = admit_priority(server, options.priority)
    predicted = await predicted_tokens(
        options.prediction or "", model, is_used=server.speculates and options.may_draft
    )
    options = replace(options, cache_salt=client_salt(server, options.cache_salt))
    requests = build_engine_requests(
        response_id, [prompt], options, rules, server.limits, priority, predicted
    )
    return ResolvedChat(
        requests=requests,
        prompt=prompt,
        plan=plan,
        markers=markers,
        ignored=("response_format",) if is_displaced else (),
        has_prediction=options.prediction is not None,
    )


def _kept_ids(plan: ParserPlan, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the special tokens that stay in the text for the parsers."""
    special = tokenizer.special_ids
    return frozenset(special[marker] for marker in plan.markers if marker in special)
