"""Request fields for tools: the functions, the choice among them, and earlier calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from moe_serve.errors import InvalidRequestError
from moe_serve.http.schema.field_types import StrictSchema, at_most
from moe_serve.text.assistant.tool import Tool

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 * 1024  # of all tools of a request together, as JSON
MAX_SCHEMA_DEPTH = 32
_NAME = r"^[A-Za-z0-9_.:\-]{1,64}$"


class FunctionDefinition(StrictSchema):
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a forced call always follows the schema, other calls need not


class ToolDefinition(StrictSchema):
    type: Literal["function"]
    function: FunctionDefinition


class CalledFunction(StrictSchema):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | None = None


class CallMessage(StrictSchema):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """A choice among some of the tools: the model sees only these."""

    mode: Literal["auto", "required"]
    names: tuple[str, ...]


def _choice(value: Any) -> Any:
    """Normalises tool_choice: one of the words, a function as {"name": ...}, or AllowedTools."""
    if value is None or value in ("none", "auto", "required"):
        return value
    if isinstance(value, Mapping):
        name = _function_name(value)
        if name is not None:
            return {"name": name[:256]}
        allowed = value.get("allowed_tools") if value.get("type") == "allowed_tools" else None
        if isinstance(allowed, Mapping) and allowed.keys() == {"mode", "tools"}:
            mode, tools = allowed["mode"], allowed["tools"]
            names = [_function_name(tool) for tool in tools] if isinstance(tools, list) else []
            known = tuple(name for name in names if name is not None)
            if mode in ("auto", "required") and known and len(known) == len(names):
                return AllowedTools(mode, known)
    raise PydanticCustomError(
        "tool_choice",
        'must be "none", "auto", "required", {"type": "function", "function": '
        '{"name": a string}} or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or '
        '"required", "tools": a list of such functions}}',
    )


def _function_name(value: Any) -> str | None:
    """Returns the name in {"type": "function", "function": {"name": ...}}; None: another form."""
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) and value.get("type") == "function" else None


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_FUNCTION_SCHEMA = _object(
    {"type": {"const": "function"}, "function": _object({"name": {"type": "string"}})}
)
_ALLOWED_SCHEMA: dict[str, Any] = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "minItems": 1, "items": _FUNCTION_SCHEMA},
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _FUNCTION_SCHEMA,
        _object(
            {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {**_object(_ALLOWED_SCHEMA), "additionalProperties": False},
            }
        ),
    ]
}
ToolChoice = Annotated[
    str | dict[str, str] | AllowedTools, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)
]
ToolList = Annotated[
    list[ToolDefinition],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_TOOLS}),
    at_most("tools", MAX_TOOLS),
]
CallList = Annotated[list[CallMessage], Field(fail_fast=True), at_most("calls", MAX_TOOLS)]


def allowed_tools(
    tools: Sequence[ToolDefinition], choice: str | dict[str, str] | AllowedTools | None
) -> tuple[tuple[ToolDefinition, ...], str | dict[str, str] | None]:
    """Returns the tools that the choice leaves, and the choice among these."""
    if not isinstance(choice, AllowedTools):
        return tuple(tools), choice
    return tuple(tool for tool in tools if tool.function.name in choice.names), choice.mode


def check_tools(
    tools: Sequence[ToolDefinition], choice: str | dict[str, str] | AllowedTools | None
) -> None:
    """Checks the sizes and names of the tools, and that the choice is one of them."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools: each function needs a unique name.", param="tools")
    for i, tool in enumerate(tools):
        param = f"tools.{i}.function.parameters"
        check_depth(tool.function.parameters, param, MAX_SCHEMA_DEPTH)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequestError(f'{param}.type must be "object".', param=param)
    size = len(msgspec.json.encode(tool_dicts(tools))) if tools else 0
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(
            f"tools take {size} bytes of JSON; the limit is {MAX_TOOLS_BYTES}.", param="tools"
        )
    if choice == "required" and not tools:
        raise InvalidRequestError(
            'tool_choice "required" needs at least one function in tools.', param="tool_choice"
        )
    chosen: tuple[str, ...] = (choice["name"],) if isinstance(choice, dict) else ()
    for name in choice.names if isinstance(choice, AllowedTools) else chosen:
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice names {name[:64]!r}, which is not in tools.", param="tool_choice"
            )


def check_depth(value: Any, param: str, limit: int) -> None:
    """Checks the nesting depth, one level at a time, so that a hostile depth costs nothing."""
    level, depth = [value], 0
    while level:
        if depth > limit:
            raise InvalidRequestError(f"{param} is nested deeper than {limit} levels.", param=param)
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        level, depth = [item for item in below if isinstance(item, dict | list)], depth + 1


def tool_dicts(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Returns the tools for the chat template, as the client sent them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


def tools_by_name(tools: Sequence[ToolDefinition]) -> dict[str, Tool]:
    """Returns the tools for parsers and grammars."""
    functions = [tool.function for tool in tools]
    return {
        function.name: Tool(function.name)
        if function.parameters is None
        else Tool(function.name, {"type": "object", **function.parameters})
        for function in functions
    }
