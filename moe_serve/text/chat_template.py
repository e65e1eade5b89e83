"""Renders a chat as one prompt text with the checkpoint's Jinja template, in separate processes.

No part of a template runs in this process, neither its compilation nor the check of a folder's
template.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_serve.errors import CheckpointError, InvalidRequestError
from moe_serve.regular_file import is_there, regular_file
from moe_serve.text.template_frames import Kind, Order, Reply, Setup
from moe_serve.text.template_renderer import SLOW, TemplateRenderer
from moe_serve.text.tokenizer import read_json_file

_log = logging.getLogger(__name__)

MAX_RENDERED_CHARS = 8 * 1024 * 1024
MAX_RENDER_SECONDS = SLOW.max_seconds
MAX_RENDER_BYTES = SLOW.max_bytes
_MAX_SOURCE_CHARS = 1024 * 1024


class ChatTemplate:
    """Renders messages; `special_tokens` are what the template sees as `bos_token` and so on.

    The first rendering, or `check`, starts a worker process, and `close` ends them. Several threads
    may use it.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_SECONDS,
        max_bytes: int = MAX_RENDER_BYTES,
    ) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise CheckpointError(
                f"{name} has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are allowed."
            )
        self.source = source
        self._name = name
        self._setup = Setup(
            source=source,
            special_tokens=dict(special_tokens or {}),
            max_chars=max_chars,
            max_seconds=max_seconds,
            max_bytes=max_bytes,
        )
        self._renderer = TemplateRenderer(self._setup)

    @classmethod
    def load(
        cls, folder: Path, *, special_tokens: Mapping[str, str] | None = None
    ) -> ChatTemplate | None:
        """Reads chat_template.jinja, or else tokenizer_config.json. Returns None if neither has a
        template.

        Raises CheckpointError if it cannot be compiled.
        """
        path = folder / "chat_template.jinja"
        if is_there(path):
            try:
                source = regular_file(path).read_text(encoding="utf-8")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
            except UnicodeDecodeError:
                raise CheckpointError(f"{path} is not UTF-8 text.") from None
            return cls(source, special_tokens=special_tokens, name=str(path)).check()
        path = folder / "tokenizer_config.json"
        entry = read_json_file(path).get("chat_template")
        if isinstance(entry, list):  # several named templates
            entry = {item["name"]: item["template"] for item in entry}.get("default")
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of them.")
        name = f"chat_template in {path}"
        return cls(entry, special_tokens=special_tokens, name=name).check()

    def check(self) -> ChatTemplate:
        """Returns the template itself if it can be compiled; raises CheckpointError if not."""
        reply = self._renderer.check()
        if reply is not None:
            self.close()
            raise self._invalid(reply)
        return self

    def close(self) -> None:
        """Ends the worker processes; rendering is impossible afterwards."""
        self._renderer.close()

    def mentions(self, name: str) -> bool:
        """Returns whether the template contains this word; if not, the value has no effect."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def has_text_arguments(self) -> bool:
        """Returns whether the arguments of earlier calls must be JSON text.

        That is so if an object cannot be rendered, or is rendered in Python's notation.
        """
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
        """Returns the prompt text.

        Raises InvalidRequestError if the template refuses or a limit is hit.

        Content is text, or a list of `{"type": "text", "text": ...}` parts (joined by newlines).
        `options` are further names that the template may read; they override none of its own.
        """
        order = self.order(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, options=options
        )
        return self._text(self._renderer.render(order))

    async def render_order(self, order: bytes) -> str:
        """Renders the result of `order` without blocking the event loop.

        Raises as `render` does, and ServerOverloadedError if too many chats wait.
        """
        return self._text(await self._renderer.render_async(order))

    def order(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        continues: bool = False,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Encodes a chat for the worker processes; see `render`.

        `continues`: the text ends where the content of the last message ends.
        """
        order = Order(
            messages=[_with_plain_content(i, message) for i, message in enumerate(messages)],
            tools=None if tools is None else list(tools),
            options=options or {},
            add_generation_prompt=add_generation_prompt and not continues,
            continues=continues,
        )
        try:
            return order.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _refusal(f"The messages cannot be written as JSON: {error}.") from error

    def _text(self, reply: Reply) -> str:
        if reply.kind is Kind.TEXT:
            return reply.text
        if reply.kind is Kind.INVALID:
            raise self._invalid(reply)
        setup = self._setup
        mib = setup.max_bytes // 2**20
        reasons = {
            Kind.REFUSED: f"The chat template refuses these messages: {reply.text}",
            Kind.FAILED: f"The chat template failed on these messages: {reply.text}",
            Kind.HIDDEN: (
                "The chat template does not show the last message, so it cannot be continued."
            ),
            Kind.LONG: f"The rendered chat is longer than {setup.max_chars} characters.",
            Kind.LATE: f"Rendering the chat took longer than {setup.max_seconds:g} s.",
            Kind.LARGE: f"Rendering the chat took more than {mib} MiB of memory.",
        }
        if reply.kind in (Kind.LATE, Kind.LARGE):
            _log.warning("a chat is refused: %s", reasons[reply.kind])
        raise _refusal(reasons[reply.kind])

    def _invalid(self, reply: Reply) -> CheckpointError:
        return CheckpointError(f"{self._name} is not a valid Jinja template: {reply.text}.")


def _with_plain_content(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return dict(message)
    param = f"messages.{index}.content"
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"{param} must be a string or a list of parts.", param=param)
    return {**message, "content": join_text_parts(content, param)}


def join_text_parts(parts: Sequence[Any], param: str) -> str:
    """Joins the text of a list of content parts; a part that is not text is refused."""
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
