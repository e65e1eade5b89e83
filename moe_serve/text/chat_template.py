"""A chat as one prompt text: the checkpoint's Jinja template, within limits."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from moe_serve.errors import CheckpointError, InvalidRequestError
from moe_serve.regular_file import is_there, regular_file
from moe_serve.text.chat_environment import TemplateRefusedError, chat_environment
from moe_serve.text.template_limits import DEADLINE, TemplateTimeoutError
from moe_serve.text.tokenizer import read_json_file

MAX_RENDERED_CHARS = 8 * 1024 * 1024
MAX_RENDER_SECONDS = 10.0
_MARK = "(the last message ends here)"


class ChatTemplate:
    """Renders messages; `special_tokens` are what the template sees as `bos_token` and so on."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_SECONDS,
    ) -> None:
        try:
            self._template = chat_environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"{name} is not a valid Jinja template: {error}.") from error
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._max_chars = max_chars
        self._max_seconds = max_seconds

    @classmethod
    def load(
        cls, folder: Path, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json; None if neither has one."""
        path = folder / "chat_template.jinja"
        if is_there(path):
            try:
                source = regular_file(path).read_text(encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
            except UnicodeDecodeError:
                raise CheckpointError(f"{path} is not UTF-8 text.") from None
            return cls(source, special_tokens=special_tokens, name=str(path))
        path = folder / "tokenizer_config.json"
        entry = read_json_file(path).get("chat_template")
        if isinstance(entry, list):  # several named templates
            entry = {item["name"]: item["template"] for item in entry}.get("default")
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of them.")
        return cls(entry, special_tokens=special_tokens, name=f"chat_template in {path}")

    def mentions(self, name: str) -> bool:
        """Whether the template has this word anywhere: without it, the value has no effect."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def has_text_arguments(self) -> bool:
        """Whether the arguments of earlier calls must be JSON text: an object cannot be rendered,
        or comes out as Python writes it."""
        call = {"name": "f", "arguments": {"probe": "x"}}
        calls = [{"id": "0" * 9, "type": "function", "function": call}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "0" * 9, "name": "f", "content": "c"},
        ]
        try:
            return "'probe'" in self.render(messages)
        except InvalidRequestError:
            return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidRequestError if the template refuses or a limit is hit.

        Content is text, or a list of `{"type": "text", "text": ...}` parts (joined by newlines).
        `options` are further names that the template may look at; they hide none of its own.
        """
        context: dict[str, Any] = {
            **(options or {}),
            **self._special_tokens,
            "messages": [_with_plain_content(i, message) for i, message in enumerate(messages)],
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
        }
        try:
            return self._render_within_limits(context)
        except InvalidRequestError:
            raise
        except TemplateTimeoutError:
            raise self._late() from None
        except TemplateRefusedError as error:
            raise _refusal(f"The chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is foreign code and can raise anything
            kind = type(error).__name__
            raise _refusal(
                f"The chat template failed on these messages: {kind}: {error}"
            ) from error

    def render_to_continue(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text up to the end of the last message's content, for the model to go on.

        What the template writes behind it shows when something is appended to the content: to look
        for the content itself would find a "<" in the "<|im_end|>" behind it.
        """
        last = _with_plain_content(len(messages) - 1, messages[-1])
        marked = {**last, "content": last["content"] + _MARK}
        text, marked_text = (
            self.render(
                [*messages[:-1], message], add_generation_prompt=False, tools=tools, options=options
            )
            for message in (last, marked)
        )
        _, mark, behind = marked_text.rpartition(_MARK)
        if not (mark and text.endswith(behind)):
            raise _refusal("The chat template does not show the last message, so it cannot go on.")
        return text.removesuffix(behind)

    def _render_within_limits(self, context: dict[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        deadline = time.monotonic() + self._max_seconds
        DEADLINE.set(deadline)
        for piece in self._template.generate(context):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > self._max_chars:
                raise _refusal(f"The rendered chat is longer than {self._max_chars} characters.")
            if time.monotonic() > deadline:
                raise self._late()
        return "".join(pieces)

    def _late(self) -> InvalidRequestError:
        return _refusal(f"Rendering the chat took longer than {self._max_seconds:g} s.")


def _with_plain_content(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    param = f"messages.{index}.content"
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{param} must be a string or a list of parts.", param=param)
    return {**message, "content": join_text_parts(content, param)}


def join_text_parts(parts: Sequence[Any], param: str) -> str:
    """The text of a list of content parts; any part that is not text is refused."""
    texts: list[str] = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(text, str):
            texts.append(text)
            continue
        got = f", got type {json.dumps(kind[:40])}" if isinstance(kind, str) else ""
        raise InvalidRequestError(
            f'{param}.{i} must be {{"type": "text", "text": a string}}, as only text is served'
            f"{got}.",
            param=f"{param}.{i}",
        )
    return "\n".join(texts)


def _refusal(message: str) -> InvalidRequestError:
    text = message if len(message) <= 400 else message[:400] + "..."
    return InvalidRequestError(text, param="messages")
