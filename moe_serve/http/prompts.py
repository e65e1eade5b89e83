"""The prompts of a request as token ids.

Long texts are tokenized off the event loop; texts that cannot fit the context are not tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from moe_serve.engine.sampling_params import MAX_CHOICES
from moe_serve.errors import ContextLengthError, InvalidRequestError
from moe_serve.http.chat_messages import ChatMessage
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
    tools, options = body.template_tools(), body.template_options()
    has_prompt = body.add_generation_prompt is not False
    has_text_arguments = bool(body.has_calls and template.has_text_arguments)

    def work() -> Prompt:
        messages = body.template_messages(has_text_arguments=has_text_arguments)
        if body.continue_final_message:
            text = template.render_to_continue(messages, tools=tools, options=options)
        else:
            text = template.render(
                messages, add_generation_prompt=has_prompt, tools=tools, options=options
            )
        if body.truncate_prompt_tokens is None:
            _check_text_length(text, "messages", model)
        token_ids = model.tokenizer.encode(text, add_special_tokens=False)
        return Prompt(token_ids=tuple(token_ids), text=text, param="messages")

    num_chars = sum(_num_chars(message) for message in body.messages)
    return await _run(work, num_chars + len(msgspec.json.encode(tools)))


async def text_prompt(text: str, model: ServedModel, *, add_special_tokens: bool) -> Prompt:
    """A text by itself, which nobody wants to continue."""

    def work() -> Prompt:
        _check_text_length(text, "prompt", model)
        token_ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Prompt(token_ids=tuple(token_ids), text=text, param="prompt")

    return await _run(work, len(text))


async def completion_prompts(
    value: Any, model: ServedModel, *, has_limit: bool = True
) -> list[Prompt]:
    """A string, a list of strings, a list of token ids, or a list of such lists.

    `has_limit` False: what is too long for the context will be truncated.
    """
    if isinstance(value, str):
        return [await _run(lambda: _encode(value, "prompt", model, has_limit), len(value))]
    if not isinstance(value, list):
        raise _bad_prompt("prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if type(value[0]) is int:
        return [_from_ids(value, "prompt", model, has_limit)]
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt holds {len(value)} prompts; at most {MAX_CHOICES} are allowed.",
            param="prompt",
        )
    params = [f"prompt.{i}" for i in range(len(value))]
    if isinstance(value[0], list):
        pairs = zip(value, params, strict=True)
        return [_from_ids(ids, param, model, has_limit) for ids, param in pairs]
    for text, param in zip(value, params, strict=True):
        if not isinstance(text, str):
            raise _bad_prompt(param)

    def work() -> list[Prompt]:
        pairs = zip(value, params, strict=True)
        return [_encode(text, param, model, has_limit) for text, param in pairs]

    return await _run(work, sum(map(len, value)))


def truncated(prompt: Prompt, limit: int | None, max_model_len: int, max_tokens: int) -> Prompt:
    """The last `limit` tokens; -1 leaves room for `max_tokens` in the context."""
    if limit is None:
        return prompt
    if limit >= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at most {max_model_len - 1}, one less than the "
            f"context, got {limit}.",
            param="truncate_prompt_tokens",
        )
    count = max(1, max_model_len - max_tokens) if limit == -1 else limit
    if len(prompt.token_ids) <= count:
        return prompt
    return replace(prompt, token_ids=prompt.token_ids[-count:], text=None)


def check_prompt_length(
    num_tokens: int, param: str, max_model_len: int, max_tokens: int | None = None
) -> None:
    """The engine makes at least one token, also for a request that asks for none.

    `max_tokens`: what the request asks for, if it says so.
    """
    if num_tokens < max_model_len:
        return
    used = tokens_requested(max_model_len, num_tokens, param, max_tokens or 1)
    raise ContextLengthError(
        f"{used} One place is kept for the next token (also with max_tokens 0): send at most "
        f"{max_model_len - 1} in {_place(param)}.",
        param=param,
        num_prompt_tokens=num_tokens,
        max_prompt_tokens=max_model_len - 1,
    )


def tokens_requested(max_model_len: int, num_tokens: int, param: str, max_tokens: int) -> str:
    """OpenAI's words for a context that is too small. LiteLLM, LangChain and agents look for them
    to tell this error from others, and to send less."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_tokens + max_tokens} tokens ({num_tokens} in {_place(param)}, {max_tokens} in the "
        f"completion)."
    )


def _place(param: str) -> str:
    return param if "." in param else f"the {param}"


def _check_text_length(text: str, param: str, model: ServedModel) -> None:
    """Refuse what cannot fit before the work of tokenizing it."""
    min_tokens = model.tokenizer.min_num_tokens(text)
    if min_tokens >= model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you "
            f"requested more: the {len(text)} characters in {_place(param)} are at least "
            f"{min_tokens} tokens. Shorten it.",
            param=param,
            num_prompt_tokens=min_tokens,
            max_prompt_tokens=model.max_model_len - 1,
        )


def _encode(text: str, param: str, model: ServedModel, has_limit: bool) -> Prompt:
    if has_limit:
        _check_text_length(text, param, model)
    return Prompt(token_ids=tuple(model.tokenizer.encode(text)), text=text, param=param)


def _from_ids(ids: Any, param: str, model: ServedModel, has_limit: bool) -> Prompt:
    """Length first: it bounds the cost of looking at every id."""
    if isinstance(ids, list) and has_limit:
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


def _num_chars(message: ChatMessage) -> int:
    """All that a template may write of it, and something for the message itself. Parts are not
    worth counting: they take the way of a long text."""
    if isinstance(message.content, list):
        return _MAX_INLINE_CHARS + 1
    texts = [message.content, message.reasoning, message.reasoning_content]
    texts += [message.name, message.tool_call_id]
    for call in message.tool_calls or ():
        texts += [call.id, call.function.arguments]
    return 64 + sum(len(text or "") for text in texts)


async def _run(work: Callable[[], T], num_chars: int) -> T:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)
