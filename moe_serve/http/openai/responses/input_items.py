"""Converts the input of a response to items, and items to the messages of a chat.

reasoning, message of the assistant, function_call, function_call   one assistant message
function_call_output                                                a message of role tool
message of user, system or developer                                itself
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from moe_serve.errors import InvalidRequestError
from moe_serve.http.openai.responses.response_body import MAX_ITEMS
from moe_serve.http.schema.parameters import check_fields

Item = dict[str, Any]
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
# For each type of item: the fields that are read, and fields that clients copy from an answer.
_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "role", "content", "status", "phase"}),
    "function_call": frozenset(
        {"type", "id", "call_id", "name", "arguments", "status", "namespace", "caller"}
    ),
    "function_call_output": frozenset(
        {"type", "id", "call_id", "output", "status", "name", "namespace", "caller"}
    ),
    "reasoning": frozenset({"type", "id", "summary", "content", "status", "encrypted_content"}),
}
_IGNORED = frozenset({"created_by", "parsed_arguments", "provider_specific_fields"})


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(value: Any, *, is_strict: bool) -> tuple[list[Item], list[str]]:
    """Returns the input as checked items with ids, and the names of fields without effect."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _misfit("input", "must be a string or a list of items", code="invalid_type")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise _misfit("input", f"must have 1 to {MAX_ITEMS} items, got {len(value)}")
    items: list[Item] = []
    ignored: list[str] = []
    for i, item in enumerate(value):
        checked = _checked(item, f"input.{i}")
        known = _FIELDS[checked["type"]]
        extras = {name: item[name] for name in item if name not in known}
        is_known = is_strict and not _is_answer(checked)
        ignored += check_fields(extras, _IGNORED, {}, f"input.{i}.", is_known)
        items.append({name: checked[name] for name in checked if name not in extras})
    return items, ignored


def _is_answer(item: Item) -> bool:
    """Returns True for an item of an earlier answer.

    Client libraries add fields of their own to such items (`parsed_arguments`), which are never an
    error.
    """
    kind = item["type"]
    return kind in ("function_call", "reasoning") or item.get("role") == "assistant"


def chat_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Converts checked items to the messages of a chat."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message, while its items follow

    def assistant(*unfilled: str) -> dict[str, Any]:
        """Returns the open assistant message if none of these fields is set in it; otherwise a new
        one."""
        nonlocal turn
        if turn is None or any(turn.get(name) for name in unfilled):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        return turn

    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            text = _reasoning_text(item)
            if text:
                fields = ("content", "tool_calls", "reasoning_content")
                assistant(*fields)["reasoning_content"] = text
        elif kind == "function_call":
            assistant().setdefault("tool_calls", []).append(_tool_call(item))
        elif kind == "message" and item["role"] == "assistant":
            assistant("content", "tool_calls")["content"] = _text(item["content"])
        else:
            turn = None
            messages.append(_message(item))
    return messages


def _checked(item: Any, param: str) -> Item:
    """Checks an item and adds its type and, if missing, its id."""
    if not isinstance(item, dict):
        raise _misfit(param, "must be an object", code="invalid_type")
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        shown = f", got {kind[:40]!r}" if isinstance(kind, str) else ""
        raise InvalidRequestError(
            f"{param}.type must be one of {', '.join(_FIELDS)}{shown}: no other types are "
            "supported.",
            param=f"{param}.type",
            code="unsupported_parameter" if isinstance(kind, str) else "invalid_value",
        )
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise _misfit(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
        _check_content(item, "content", param)
    elif kind == "function_call":
        _check_strings(item, ("call_id", "name", "arguments"), param)
    elif kind == "function_call_output":
        _check_strings(item, ("call_id",), param)
        _check_content(item, "output", param)
    elif kind == "reasoning":
        _check_reasoning(item, param)
    given = item.get("id")
    if given is not None and not (isinstance(given, str) and 1 <= len(given) <= 128):
        raise _misfit(f"{param}.id", "must be a string of 1 to 128 characters")
    checked = {**item, "type": kind, "id": given or new_id(_ID_PREFIXES[kind])}
    if kind != "reasoning":  # clients that list the items rely on the id
        checked["status"] = item.get("status") or "completed"
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        checked["content"] = [{"type": part, "text": item["content"]}]
    return checked


def _check_strings(item: Mapping[str, Any], names: Sequence[str], param: str) -> None:
    for name in names:
        if name not in item:
            raise _misfit(f"{param}.{name}", "is missing", code="missing_required_parameter")
        if not isinstance(item[name], str):
            raise _misfit(f"{param}.{name}", "must be a string", code="invalid_type")


def _check_content(item: Mapping[str, Any], name: str, param: str) -> None:
    """Checks that a field is a string, or a list of parts with text."""
    if item.get(name) is None:
        raise _misfit(f"{param}.{name}", "is missing", code="missing_required_parameter")
    content = item[name]
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _misfit(f"{param}.{name}", "must be a string or a list of parts", code="invalid_type")
    for i, part in enumerate(content):
        _check_part(part, f"{param}.{name}.{i}")


def _check_part(part: Any, param: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    field = "refusal" if kind == "refusal" else "text"
    if kind not in (*_TEXT_PARTS, "refusal"):
        shown = f", got {kind[:40]!r}" if isinstance(kind, str) else ""
        raise InvalidRequestError(
            f"{param}.type must be one of {', '.join(_TEXT_PARTS)}, because only text is "
            f"supported{shown}.",
            param=f"{param}.type",
        )
    if not isinstance(part.get(field), str):
        raise _misfit(f"{param}.{field}", "must be a string", code="invalid_type")


def _check_reasoning(item: Mapping[str, Any], param: str) -> None:
    for name in ("summary", "content"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise _misfit(f"{param}.{name}", "must be a list of parts with text")


def _message(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item["call_id"],
            "content": _text(item["output"]),
        }
    return {"role": item["role"], "content": _text(item["content"])}


def _tool_call(item: Item) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    fields = ("refusal" if part["type"] == "refusal" else "text" for part in content)
    return "\n".join(part[field] for part, field in zip(content, fields, strict=True))


def _reasoning_text(item: Item) -> str:
    """Returns the text of the reasoning. The summary is only used if there is no content."""
    parts = item.get("content") or item.get("summary") or []
    return "\n".join(part["text"] for part in parts)


def _misfit(param: str, reason: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param} {reason}.", param=param, code=code)
