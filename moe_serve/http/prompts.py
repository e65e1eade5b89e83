"""The prompts of a request as token ids.

Long texts are tokenized off the event loop; texts that cannot fit the context are not tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_serve.engine.sampling_params import MAX_CHOICES
from moe_serve.errors import ContextLengthError, InvalidRequestError
from moe_serve.http.schemas import ChatBody
from moe_serve.http.served_model import ServedModel

_MAX_INLINE_CHARS = 4096
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`param` is the field it came from; `text` is None for a prompt given as token ids."""

    token_ids: tuple[int, ...]
    text: str | None
    param: str


async def chat_prompt(body: ChatBody, model: ServedModel) -> Prompt:
    """Render the chat template and tokenize; the template writes the special tokens itself."""
    template = model.require_chat_template()
    has_prompt = body.add_generation_prompt is not False

    def work() -> Prompt:
        text = template.render(body.plain_messages(), add_generation_prompt=has_prompt)
        _check_text_length(text, "messages", model)
        token_ids = model.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(token_ids=tuple(token_ids), text=text, param="messages")

    num_chars = sum(_num_chars(message.content) for message in body.messages)
    return await _run(work, num_chars + 64 * len(body.messages))


async def completion_prompts(value: Any, model: ServedModel) -> list[Prompt]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return [await _run(lambda: _encode(value, "prompt", model), len(value))]
    if not isinstance(value, list):
        raise _bad_prompt("prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if type(value[0]) is int:
        return [_from_ids(value, "prompt", model)]
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt holds {len(value)} prompts; at most {MAX_CHOICES} are allowed.",
            param="prompt",
        )
    params = [f"prompt.{i}" for i in range(len(value))]
    if isinstance(value[0], list):
        return [_from_ids(ids, param, model) for ids, param in zip(value, params, strict=True)]
    for text, param in zip(value, params, strict=True):
        if not isinstance(text, str):
            raise _bad_prompt(param)

    def work() -> list[Prompt]:
        pairs = zip(value, params, strict=True)
        return [_encode(text, param, model) for text, param in pairs]

    return await _run(work, sum(map(len, value)))


def check_prompt_length(num_tokens: int, param: str, max_model_len: int) -> None:
    """The engine makes at least one token, also for a request that asks for none."""
    if num_tokens >= max_model_len:
        raise ContextLengthError(
            f"The context of this model is {max_model_len} tokens; {param} has {num_tokens}, and "
            f"one place is kept for the next token (also with max_tokens 0): send at most "
            f"{max_model_len - 1}.",
            param=param,
        )


def _check_text_length(text: str, param: str, model: ServedModel) -> None:
    """Refuse what cannot fit before the work of tokenizing it."""
    min_tokens = model.tokenizer.min_num_tokens(text)
    if min_tokens >= model.max_model_len:
        raise ContextLengthError(
            f"The context of this model is {model.max_model_len} tokens; {param} has "
            f"{len(text)} characters, which are at least {min_tokens} tokens: shorten it.",
            param=param,
        )


def _encode(text: str, param: str, model: ServedModel) -> Prompt:
    _check_text_length(text, param, model)
    return Prompt(token_ids=tuple(model.tokenizer.encode(text)), text=text, param=param)


def _from_ids(ids: Any, param: str, model: ServedModel) -> Prompt:
    """Length first: it bounds the cost of looking at every id."""
    if isinstance(ids, list):
        check_prompt_length(len(ids), param, model.max_model_len)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise _bad_prompt(param)
    return Prompt(token_ids=tuple(ids), text=None, param=param)


def _bad_prompt(param: str) -> InvalidRequestError:
    subject = "prompt" if param == "prompt" else f"{param} does not fit in: prompt"
    return InvalidRequestError(
        f"{subject} must be a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids.",
        param=param,
        code="invalid_type",
    )


def _num_chars(content: str | list[Any]) -> int:
    """Parts are not worth counting: they take the way of a long text."""
    return len(content) if isinstance(content, str) else _MAX_INLINE_CHARS + 1


async def _run(work: Callable[[], T], num_chars: int) -> T:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)
