"""Writes the responses and stream chunks of /v1/completions, with and without echo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_serve.engine.request.request import TokenLogprob
from moe_serve.http.generation.answer_sequence import Piece
from moe_serve.http.generation.logprob_format import (
    completion_logprobs,
    prompt_logprobs,
    routed_fields,
    routed_json,
)
from moe_serve.http.generation.prompts import Prompt
from moe_serve.http.generation.usage import Usage
from moe_serve.http.openai.answers import (
    Choice,
    ChunkWriter,
    ResponseHead,
    timing_fields,
    usage_fields,
)
from moe_serve.text.detokenizer import make_detokenizer
from moe_serve.text.text_stream import TextDelta
from moe_serve.text.tokenizer import Tokenizer


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
        """The events for a piece: text, then the finish reason."""
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
        """The complete answer as one object."""
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
        """The logprobs of the prompt (if echoed with logprobs), followed by the generated ones."""
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
