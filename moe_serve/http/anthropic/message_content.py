"""Converts Anthropic's messages, whose content is made of blocks, to the messages of a chat.

thinking, text, tool_use of the assistant   one assistant message
tool_result of the user                     a message of role tool each, before the user's text
text of the user or the system              the text of that message
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.parameters import check_fields

_IGNORED = frozenset(
    {"cache_control", "caller", "citations", "parsed_output", "provider_specific_fields"}
    | {"toolset_name"}
)
# The fields that are read, for each type of block.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content", "is_error"),
}
_KINDS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_TYPES: Mapping[str, tuple[type, str]] = {
    "text": (str, "a string"),
    "thinking": (str, "a string"),
    "id": (str, "a string"),
    "name": (str, "a string"),
    "tool_use_id": (str, "a string"),
    "input": (dict, "an object"),
}
Block = Mapping[str, Any]


class ContentReader:
    """Reads the messages of one request; `ignored` names the fields without effect."""

    def __init__(self, *, is_strict: bool) -> None:
        self.ignored: list[str] = []
        self._is_strict = is_strict

    def system(self, value: Any) -> list[dict[str, Any]]:
        """Returns the system message for a string or a list of text blocks; no message for an empty
        one."""
        text = "" if value is None else _text(self._blocks(value, "system", "system"))
        return [{"role": "system", "content": text}] if text else []

    def messages(self, messages: Sequence[Any]) -> list[dict[str, Any]]:
        """Converts the messages. Consecutive messages of one role are joined."""
        read: list[dict[str, Any]] = []
        for i, message in enumerate(messages):
            for made in self._message(message, f"messages.{i}"):
                if read and _are_one_turn(read[-1], made):
                    read[-1]["content"] += "\n" + made["content"]
                else:
                    read.append(made)
        return read

    def _message(self, message: Any, param: str) -> list[dict[str, Any]]:
        if not isinstance(message, dict):
            raise _misfit(param, "must be an object", "invalid_type")
        role = message.get("role")
        if not isinstance(role, str) or role not in _KINDS:
            raise _misfit(f"{param}.role", f"must be one of {', '.join(_KINDS)}")
        extras = {k: v for k, v in message.items() if k not in ("role", "content")}
        self._check(extras, f"{param}.", role)
        if message.get("content") is None:
            raise _misfit(f"{param}.content", "is missing", "missing_required_parameter")
        blocks = self._blocks(message["content"], role, f"{param}.content")
        if role == "assistant":
            return [_assistant(blocks)]
        results = [_tool_message(block) for block in blocks if block["type"] == "tool_result"]
        texts = [block for block in blocks if block["type"] == "text"]
        said = [{"role": role, "content": _text(texts)}] if texts or not results else []
        return [*results, *said]

    def _blocks(self, content: Any, role: str, param: str) -> list[Block]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise _misfit(param, "must be a string or a list of blocks", "invalid_type")
        return [self._block(block, role, f"{param}.{i}") for i, block in enumerate(content)]

    def _block(self, block: Any, role: str, param: str) -> Block:
        kinds = _KINDS[role]
        if not isinstance(block, dict):
            raise _misfit(param, "must be an object", "invalid_type")
        kind = block.get("type")
        if not isinstance(kind, str) or kind not in kinds:
            shown = f", got {kind[:40]!r}" if isinstance(kind, str) else ""
            code = "unsupported_parameter" if isinstance(kind, str) else "invalid_value"
            raise _misfit(f"{param}.type", f"must be one of {', '.join(kinds)} here{shown}", code)
        known = _FIELDS[kind]
        for name in known:
            if name in _TYPES:
                _check_type(block, name, f"{param}.{name}")
        self._check({k: v for k, v in block.items() if k not in known}, f"{param}.", role)
        if kind == "tool_result":
            content = block.get("content")
            inner = self._blocks("" if content is None else content, "system", f"{param}.content")
            return {**block, "content": inner}
        return block

    def _check(self, extras: Mapping[str, Any], prefix: str, role: str) -> None:
        """Checks undeclared fields. In an answer that a client sends back they are never an
        error."""
        is_strict = self._is_strict and role != "assistant"
        for name in check_fields(extras, _IGNORED, {}, prefix, is_strict):
            short = name.removeprefix(prefix)  # a field that many blocks have is reported once
            self.ignored.append(short if short in _IGNORED else name)


def _assistant(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = _text([block for block in blocks if block["type"] == "text"])
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [_tool_call(block) for block in blocks if block["type"] == "tool_use"]
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _tool_message(block: Block) -> dict[str, Any]:
    content = _text(block["content"])
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(block["text"] for block in blocks)


def _are_one_turn(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Returns True for two user messages, and for two assistant messages that have only text."""
    if first["role"] != second["role"] or first["role"] not in ("user", "assistant"):
        return False
    return first.keys() == second.keys() == {"role", "content"}


def _check_type(block: Block, name: str, param: str) -> None:
    kind, words = _TYPES[name]
    if name not in block:
        raise _misfit(param, "is missing", "missing_required_parameter")
    if not isinstance(block[name], kind):
        raise _misfit(param, f"must be {words}", "invalid_type")


def _misfit(param: str, reason: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param} {reason}.", param=param, code=code)
