"""Calls cut by a limit or a stop string, in every format and at every character."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from moe_serve.text.assistant.deepseek_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from moe_serve.text.assistant.formats import REASONING_FORMATS, TOOL_FORMATS, ParserPlan
from moe_serve.text.assistant.parser import AssistantParser
from moe_serve.text.assistant.tool import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "wet": {"type": "boolean"},
    },
}
TOOLS = {"get_weather": Tool("get_weather", SCHEMA), "now": Tool("now")}
WHOLE = '{"city": "Oslo < 3", "days": 12, "wet": true}'
JSON_CALL = f'{{"name": "get_weather", "arguments": {WHOLE}}}'
XML_ARGUMENTS = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in (("city", "Oslo < 3"), ("days", "12"), ("wet", "True"))
)
GLM_ARGUMENTS = "".join(
    f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
    for name, value in (("city", "Oslo < 3"), ("days", "12"), ("wet", "true"))
)
# Each writes one call with arguments and one without, as the grammar of a forced call has them.
TEXTS: Mapping[str, str] = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_xml": f"<tool_call>\n<function=get_weather>\n{XML_ARGUMENTS}</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm45": f"<tool_call>get_weather\n{GLM_ARGUMENTS}</tool_call>\n<tool_call>now\n</tool_call>",
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{WHOLE}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral-list": f'[TOOL_CALLS][{JSON_CALL}, {{"name": "now", "arguments": {{}}}}]',
    "deepseek_v3": f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n{WHOLE}"
    f"\n```{CALL_END}\n{CALL_BEGIN}function{SEPARATOR}now\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
    "deepseek_v31": f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{WHOLE}{CALL_END}"
    f"{CALL_BEGIN}now{SEPARATOR}{{}}{CALL_END}{CALLS_END}",
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WHOLE}"
    "<|call|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json"
    "<|message|>{}<|call|>",
}
OPENINGS = ("<tool_call>", "<function=", "[TOOL_CALLS]", CALLS_BEGIN, "<|channel|>")


def plan(name: str, *, is_forced: bool) -> ParserPlan:
    reasons = REASONING_FORMATS["gpt-oss" if name == "openai" else "qwen3"]
    tool_format = TOOL_FORMATS[name.removesuffix("-list")]
    return ParserPlan(
        tool_format=tool_format, reasoning_format=reasons, tools=TOOLS, is_forced=is_forced
    )


def run(
    parser: AssistantParser, pieces: Sequence[str], *, is_cut: bool = True
) -> tuple[str, list[list[str]]]:
    """Returns the content, and [name, arguments] of each call."""
    deltas = [*(parser.push(piece) for piece in pieces), parser.finish(is_cut=is_cut)]
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    return "".join(delta.content for delta in deltas), calls


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("is_forced", [True, False])
def test_a_cut_at_every_character(name: str, is_forced: bool) -> None:
    text = TEXTS[name]
    own = plan(name, is_forced=is_forced)
    assert run(own.make(), [text]) == ("", [["get_weather", WHOLE], ["now", "{}"]])
    for end in range(len(text)):
        parser = own.make()
        content, calls = run(parser, text[:end])
        assert (content, calls) == run(own.make(), [text[:end]]), "the pieces do not matter"
        if content:  # of an answer that was not forced, which may begin as a marker does
            assert not is_forced and any(opening.startswith(content) for opening in OPENINGS)
            assert not calls
        check_calls(calls, parser, end)


def check_calls(calls: list[list[str]], parser: AssistantParser, end: int) -> None:
    """Checks that all calls but the last are whole, and that the last is a beginning, not made
    up."""
    for called, arguments in calls[:-1]:
        assert [called, arguments] == ["get_weather", WHOLE]
    if calls:
        called, arguments = calls[-1]
        expected = WHOLE if called == "get_weather" else "{}"
        as_written = expected.replace("true", "True")  # the last value, by one of the formats
        assert expected.startswith(arguments) or as_written.startswith(arguments), (end, arguments)
        if not is_object(arguments):
            assert parser.has_cut_call, (end, arguments)


@pytest.mark.parametrize("name", TEXTS)
def test_what_the_model_ended_itself_is_as_before(name: str) -> None:
    """An opening marker without anything behind it is content, and no text is lost."""
    text = TEXTS[name]
    marker = next(opening for opening in OPENINGS if text.startswith(opening))
    parser = plan(name, is_forced=False).make()
    content, calls = run(parser, [text[: len(marker) + 2]], is_cut=False)
    assert not calls and not parser.has_cut_call
    kept = text[: len(marker) + 2]
    assert content == (kept.removeprefix(CALLS_BEGIN) if "deepseek" in name else kept)


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_call_is_kept_at_a_cut(name: str) -> None:
    for text in ("if a <", "see [TOOL", "a <tool_cal", "Oslo [", "1 <| 2"):
        parser = plan(name, is_forced=False).make()
        assert run(parser, [text]) == (text, [])
        assert not parser.has_cut_call


def test_arguments_that_came_as_text() -> None:
    parser = plan("hermes", is_forced=False).make()
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b'
    assert run(parser, [text]) == ("", [["f", '{"a": "b']])
    assert parser.has_cut_call


def test_a_call_whose_arguments_are_whole_is_not_cut() -> None:
    """A stop string that is the end of the markup leaves such a call."""
    for end in ("", "\n", "\n</tool"):
        parser = plan("hermes", is_forced=False).make()
        _, calls = run(parser, [f"<tool_call>\n{JSON_CALL}{end}"])
        assert calls == [["get_weather", WHOLE]] and not parser.has_cut_call
    parser = plan("openai", is_forced=True).make()
    run(parser, [TEXTS["openai"].partition("<|call|>")[0]])
    assert not parser.has_cut_call


def test_a_call_beyond_the_allowed_ones_cuts_nothing() -> None:
    own: Any = plan("hermes", is_forced=False)
    parser = ParserPlan(
        tool_format=own.tool_format, reasoning_format=None, tools=TOOLS, max_calls=1
    ).make()
    text = f'<tool_call>{JSON_CALL}</tool_call><tool_call>{{"name": "now", "argum'
    assert run(parser, [text])[1] == [["get_weather", WHOLE]]
    assert not parser.has_cut_call
