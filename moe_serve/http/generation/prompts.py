"""Converts the prompts of a request to token ids.

Long texts are tokenized off the event loop. Texts that cannot fit the context are not tokenized.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moe_serve.engine.request.sampling_params import MAX_CHOICES
from moe_serve.errors import ContextLengthError, InvalidRequestError
from moe_serve.http.generation.chat_request import Chat, Truncation
from moe_serve.http.generation.served_model import MAX_INLINE_CHARS, ServedModel
from moe_serve.http.schema.chat_messages import ChatMessage

_MAX_CUT_BYTES = 262_144  # least limit for a text that is truncated after tokenization


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as token ids. `param` is the field it came from; `text` is None for given token
    ids."""

    token_ids: tuple[int, ...]
    text: str | None
    param: str


async def render_prompt(chat: Chat, model: ServedModel) -> Prompt:
    """Renders the chat template and tokenizes. The template writes the special tokens itself."""
    template = model.require_chat_template()
    tools, options = chat.template_tools(), chat.template_options()
    has_text_arguments = bool(
        chat.has_calls and await asyncio.to_thread(lambda: template.has_text_arguments)
    )

    def order() -> bytes:
        return template.order(
            chat.template_messages(has_text_arguments=has_text_arguments),
            continues=chat.continues,
            add_generation_prompt=chat.adds_generation_prompt,
            tools=tools,
            options=options,
        )

    num_chars = sum(_num_chars(message) for message in chat.messages)
    size = num_chars + len(msgspec.json.encode(tools))
    text = await template.render_order(await model.texts.run(order, size))
    has_limit = chat.truncation is None
    return await _encoded(text, "messages", model, has_limit=has_limit, has_special=False)


async def text_prompt(text: str, model: ServedModel, *, add_special_tokens: bool) -> Prompt:
    """Tokenizes a text that is not to be continued."""
    return await _encoded(text, "prompt", model, has_limit=True, has_special=add_special_tokens)


async def predicted_tokens(text: str, model: ServedModel, *, is_used: bool) -> tuple[int, ...]:
    """Tokenizes the answer that a client expects, without special tokens. A text that is longer
    than any answer is refused before it is tokenized. If the prediction is not used, its text is
    only checked.
    """
    param, least = "prediction.content", model.tokenizer.min_num_tokens(text)
    most = model.max_model_len * model.tokenizer.usual_bytes_per_token
    if least >= model.max_model_len or len(text) > most:
        raise InvalidRequestError(
            f"{param} has {len(text)} characters, which is more than any answer of this model: its "
            f"context is {model.max_model_len} tokens of at most "
            f"{model.tokenizer.usual_bytes_per_token} bytes. Shorten it.",
            param=param,
        )

    if not is_used:
        return ()

    def work() -> tuple[int, ...]:
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    return await model.texts.run(work, len(text))


async def completion_prompts(
    value: Any, model: ServedModel, *, has_limit: bool = True
) -> list[Prompt]:
    """Tokenizes a string or a list of strings, or takes a list of token ids or of such lists.

    `has_limit` False: a prompt that exceeds the context will be truncated later.
    """
    if isinstance(value, str):
        return [await _encoded(value, "prompt", model, has_limit=has_limit)]
    if not isinstance(value, list):
        raise _bad_prompt("prompt")
    if not value:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if type(value[0]) is int:
        return [_from_ids(value, "prompt", model, has_limit)]
    if len(value) > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompt has {len(value)} prompts; at most {MAX_CHOICES} are allowed.",
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
        return [_encode(text, param, model, has_limit, True) for text, param in pairs]

    return await model.texts.run(work, sum(map(len, value)))


def truncated(
    prompt: Prompt, truncation: Truncation | None, max_model_len: int, max_tokens: int | None
) -> Prompt:
    """Truncates a prompt that is too long. The room for the answer is `max_tokens`; None: one
    token."""
    if truncation is None:
        return prompt
    limit = truncation.limit
    if limit >= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be at most {max_model_len - 1}, one less than the "
            f"context, got {limit}.",
            param="truncate_prompt_tokens",
        )
    count = max(1, max_model_len - (max_tokens or 1)) if limit == -1 else limit
    if len(prompt.token_ids) <= count:
        return prompt
    keeps_first = truncation.side == "right"
    kept = prompt.token_ids[:count] if keeps_first else prompt.token_ids[-count:]
    return replace(prompt, token_ids=kept, text=None)


def check_prompt_length(
    num_tokens: int, param: str, max_model_len: int, max_tokens: int | None = None
) -> None:
    """Checks that the prompt leaves room for one token, which the engine always generates.

    `max_tokens` is the number that the request sets, if it does.
    """
    if num_tokens < max_model_len:
        return
    used = tokens_requested(max_model_len, num_tokens, param, max_tokens or 1)
    raise ContextLengthError(
        f"{used} One position is reserved for the next token (also with max_tokens 0): send at "
        f"most {max_model_len - 1} tokens in {_place(param)}.",
        param=param,
        num_prompt_tokens=num_tokens,
        max_prompt_tokens=max_model_len - 1,
    )


def tokens_requested(max_model_len: int, num_tokens: int, param: str, max_tokens: int) -> str:
    """OpenAI's wording of a context that is too small.

    LiteLLM, LangChain and agents look for it to recognise this error, and then send less.
    """
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{num_tokens + max_tokens} tokens ({num_tokens} in {_place(param)}, {max_tokens} in the "
        f"completion)."
    )


def _place(param: str) -> str:
    return param if "." in param else f"the {param}"


def _check_text_length(text: str, param: str, model: ServedModel, *, has_limit: bool) -> None:
    """Refuses a text that cannot fit or costs too much, before it is tokenized."""
    min_tokens = model.tokenizer.min_num_tokens(text)
    if has_limit and min_tokens >= model.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you "
            f"requested more: the {len(text)} characters in {_place(param)} are at least "
            f"{min_tokens} tokens. Shorten it.",
            param=param,
            num_prompt_tokens=min_tokens,
            max_prompt_tokens=model.max_model_len - 1,
        )
    context = model.max_model_len * model.tokenizer.usual_bytes_per_token
    most = max(_MAX_CUT_BYTES, context)
    if len(text) > most or len(text.encode()) > most:
        raise ContextLengthError(
            f"The context of this model is {model.max_model_len} tokens; {param} has {len(text)} "
            f"characters, and at most {most} bytes are tokenized, also with "
            "truncate_prompt_tokens. Shorten it.",
            param=param,
        )


async def _encoded(
    text: str, param: str, model: ServedModel, *, has_limit: bool, has_special: bool = True
) -> Prompt:
    def work() -> Prompt:
        return _encode(text, param, model, has_limit, has_special)

    return await model.texts.run(work, len(text))


def _encode(
    text: str, param: str, model: ServedModel, has_limit: bool, has_special: bool
) -> Prompt:
    _check_text_length(text, param, model, has_limit=has_limit)
    token_ids = model.tokenizer.encode(text, add_special_tokens=has_special)
    return Prompt(token_ids=tuple(token_ids), text=text, param=param)


def _from_ids(ids: Any, param: str, model: ServedModel, has_limit: bool) -> Prompt:
    """Checks the length first: it bounds the cost of reading every id."""
    if isinstance(ids, list) and has_limit:
        check_prompt_length(len(ids), param, model.max_model_len)
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise _bad_prompt(param)
    return Prompt(token_ids=tuple(ids), text=None, param=param)


def _bad_prompt(param: str) -> InvalidRequestError:
    subject = "prompt" if param == "prompt" else f"{param} is invalid: prompt"
    return InvalidRequestError(
        f"{subject} must be a string, a list of strings, a list of token ids, "
        "or a list of lists of token ids.",
        param=param,
        code="invalid_type",
    )


def _num_chars(message: ChatMessage) -> int:
    """Returns the number of characters that a template may write for the message, plus a margin.

    Content parts are not counted; such a message is handled like a long text.
    """
    if isinstance(message.content, list):
        return MAX_INLINE_CHARS + 1
    texts = [message.content, message.reasoning, message.reasoning_content]
    texts += [message.name, message.tool_call_id]
    for call in message.tool_calls or ():
        texts += [call.id, call.function.arguments]
    return 64 + sum(len(text or "") for text in texts)
