"""Every assistant parser: its findings, broken text, and independence of the pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_serve.text.assistant.call_formats import (
    GlmParser,
    HermesParser,
    MistralParser,
    QwenXmlParser,
)
from moe_serve.text.assistant.deepseek_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
    DeepSeekParser,
)
from moe_serve.text.assistant.harmony_format import HarmonyParser
from moe_serve.text.assistant.outbox import Outbox
from moe_serve.text.assistant.parser import (
    AssistantParser,
    PlainParser,
    ReadingParser,
    ThinkingParser,
)
from moe_serve.text.assistant.tool import Tool
from tests.support.sampled_cases import EVERY_CASE

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "options": {"type": "object"},
    },
}
TOOLS = {"get_weather": Tool("get_weather", WEATHER), "now": Tool("now")}
Found = dict[str, Any]


def outbox() -> Outbox:
    return Outbox(lambda: "id")


def thinking(is_open: bool) -> AssistantParser:
    return ThinkingParser(HermesParser(outbox()), "<think>", "</think>", is_open=is_open)


PARSERS: Mapping[str, Callable[[], AssistantParser]] = {
    "plain": PlainParser,
    "hermes": lambda: HermesParser(outbox()),
    "qwen3_xml": lambda: QwenXmlParser(outbox(), TOOLS),
    "glm45": lambda: GlmParser(outbox(), TOOLS),
    "mistral": lambda: MistralParser(outbox()),
    "deepseek_v3": lambda: DeepSeekParser(outbox(), has_code_block=True),
    "deepseek_v31": lambda: DeepSeekParser(outbox(), has_code_block=False),
    "openai": lambda: HarmonyParser(outbox(), has_tools=True, has_reasoning=True),
    "openai-text": lambda: HarmonyParser(outbox(), has_tools=False, has_reasoning=False),
    "think": lambda: thinking(False),
    "think-open": lambda: thinking(True),
    "mistral-think": lambda: ThinkingParser(
        MistralParser(outbox()), "[THINK]", "[/THINK]", is_open=False
    ),
}


def parse(parser: AssistantParser, pieces: Iterable[str], *, is_cut: bool = False) -> Found:
    """Returns the whole message: content, reasoning, and (name, arguments) of each call."""
    deltas = [*(parser.push(piece) for piece in pieces), parser.finish(is_cut=is_cut)]
    calls: list[list[Any]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            assert call.index == len(calls)
            assert call.id is not None
            calls.append([call.name, ""])
        assert call.index == len(calls) - 1, "a call goes on before the one in front has ended"
        calls[call.index][1] += call.arguments
    return {
        "content": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "calls": [tuple(call) for call in calls],
    }


@pytest.mark.parametrize(
    ("name", "text", "is_spoilt"),
    [
        ("plain", "<tool_call>", False),
        ("hermes", "just text", False),
        ("hermes", "<tool_call>{no", True),
        ("qwen3_xml", "<tool_call>\n<parameter=a>", True),
        ("glm45", "<tool_call>\n<arg_key>", True),
        ("mistral", "[TOOL_CALLS]{}", True),
        ("deepseek_v3", f"{CALL_BEGIN}function{SEPARATOR}", True),
        ("deepseek_v31", f"{CALLS_BEGIN}{CALLS_END}", False),
        ("deepseek_v31", f"{CALL_BEGIN}{CALL_END}", True),
        ("openai", "<|channel|>final<|message|>Hi<|return|>", False),
        ("openai", "<|channel|>analysis", False),
        ("openai", "<|channel|>commentary to=functions.f <|constrain|>json", True),
        ("openai-text", "<|channel|>commentary to=functions.f <|constrain|>json", False),
        ("think", "<think><tool_call></think>Hi", False),
        ("think", "<think>Well.</think><tool_call>", True),
    ],
)
def test_a_call_that_is_none(name: str, text: str, is_spoilt: bool) -> None:
    for pieces in ([text], [*text]):
        parser = PARSERS[name]()
        parse(parser, pieces)
        assert parser.has_spoilt_call == is_spoilt, name


def found(content: str = "", reasoning: str = "", calls: Iterable[tuple[str, str]] = ()) -> Found:
    return {"content": content, "reasoning": reasoning, "calls": list(calls)}


OSLO = ("get_weather", '{"city": "Oslo"}')
PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
DS_V3 = f'{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n{{"city": "Oslo"}}\n```{CALL_END}'
DS_V31 = f'{CALL_BEGIN}get_weather{SEPARATOR}{{"city": "Oslo"}}{CALL_END}'
CALL_OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
XML_PARIS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GLM_PARIS = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
HARMONY_CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
CASES: list[tuple[str, str, Found]] = [
    ("plain", "a <tool_call> b", found("a <tool_call> b")),
    ("hermes", "just text ", found("just text ")),
    ("hermes", f"Let me see.\n{CALL_OSLO}", found("Let me see.", calls=[OSLO])),
    ("hermes", f"{CALL_OSLO}\n{CALL_OSLO}\n", found(calls=[OSLO, OSLO])),
    ("hermes", f"{CALL_OSLO}\nDone. ", found("Done. ", calls=[OSLO])),
    # arguments first, as text, none at all, odd white space, a brace in a string
    (
        "hermes",
        '<tool_call>{"arguments":{"a":"}</tool_call>"},"name":"f"}</tool_call>',
        found(calls=[("f", '{"a":"}</tool_call>"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        found(calls=[("f", '{"a": 1}')]),
    ),
    # half of a surrogate pair cannot be sent on; a whole one can, and so can its escape
    (
        "hermes",
        '<tool_call>{"name": "f\\ud800", "arguments": "{\\"a\\": \\"\\udc00\\ud83d\\ude00\\"}"}',
        found(calls=[("f\ufffd", '{"a": "\ufffd\U0001f600"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}',
        found(calls=[("f", '{"a": "\\ud800"}')]),
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', found(calls=[("f", "{}")])),
    ("hermes", '<tool_call>{"id": [1], "name": "f"}', found(calls=[("f", "{}")])),
    # broken: content, nothing lost
    ("hermes", "<tool_call>\nnot JSON</tool_call>", found("<tool_call>\nnot JSON</tool_call>")),
    ("hermes", "a<tool_call>{}</tool_call>", found("a<tool_call>{}</tool_call>")),
    ("hermes", '<tool_call>{"name": "ge', found('<tool_call>{"name": "ge')),
    ("hermes", "1 <tool_cal", found("1 <tool_cal")),
    # truncated after the name: a call with what came
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', found(calls=[("f", '{"a')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"]x', found("]x", calls=[("f", '{"a"')])),
    ("qwen3_xml", f"Yes\n\n{XML_PARIS}", found("Yes", calls=[PARIS])),
    ("qwen3_xml", XML_PARIS.removeprefix("<tool_call>\n"), found(calls=[PARIS])),
    (
        "qwen3_xml",
        '<tool_call><function=get_weather><parameter=city>\na\n"b"\\<\n</parameter>'
        "<parameter=options>\n{'x'}\n</parameter><parameter=other>\nTrue\n</parameter></function>",
        found(
            calls=[
                (
                    "get_weather",
                    '{"city": "a\\n\\"b\\"\\\\<", "options": "{\'x\'}", "other": true}',
                )
            ]
        ),
    ),
    ("qwen3_xml", "<tool_call><function=now></function></tool_call>", found(calls=[("now", "{}")])),
    ("qwen3_xml", "<tool_call>hm", found("<tool_call>hm")),
    ("qwen3_xml", "<function=now", found("<function=now")),
    (
        "qwen3_xml",
        "<function=get_weather><parameter=city>\nPar",
        found(calls=[("get_weather", '{"city": "Par')]),
    ),
    ("glm45", f"Yes\n{GLM_PARIS}\n{GLM_PARIS}", found("Yes", calls=[PARIS, PARIS])),
    ("glm45", "<tool_call>now</tool_call>", found(calls=[("now", "{}")])),
    ("glm45", "<tool_call>what is this?", found("<tool_call>what is this?")),
    (
        "mistral",
        'Hm. [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}, "id": "abc"},'
        '{"name": "now", "arguments": {}}]',
        found("Hm.", calls=[OSLO, ("now", "{}")]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}',
        found(calls=[OSLO, ("now", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Oslo"}', found(calls=[OSLO])),
    ("mistral", "[TOOL_CALLS] oh no", found("[TOOL_CALLS] oh no")),
    (
        "mistral-think",
        "[THINK]\nSo.[/THINK]I call [TOOL_CALLS]now[ARGS]{}",
        found("I call", "So.", [("now", "{}")]),
    ),
    ("deepseek_v3", f"Hm{CALLS_BEGIN}{DS_V3}\n{DS_V3}{CALLS_END}", found("Hm", calls=[OSLO, OSLO])),
    ("deepseek_v3", f"{CALL_BEGIN}function", found(f"{CALL_BEGIN}function")),
    ("deepseek_v31", f"{CALLS_BEGIN}{DS_V31}{DS_V31}{CALLS_END}", found(calls=[OSLO, OSLO])),
    ("deepseek_v31", f"{CALL_BEGIN}{SEPARATOR}x", found(f"{CALL_BEGIN}{SEPARATOR}x")),
    (
        "openai",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello",
        found("Hello", "Think."),
    ),
    (
        "openai",
        f"<|channel|>analysis<|message|>T<|end|><|start|>assistant{HARMONY_CALL}",
        found("", "T", [OSLO]),
    ),
    (
        "openai",
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        found(calls=[("now", "{}")]),
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>First this.<|end|><|start|>assistant" + HARMONY_CALL,
        found("First this.", calls=[OSLO]),
    ),
    ("openai", "no markers at all", found("no markers at all")),
    ("openai", "<|channel|>ana", found("<|channel|>ana")),
    ("openai-text", "<|channel|>analysis<|message|>T<|end|>", found("T")),
    ("think", "<think>\nA\nb\n</think>\n\nHello", found("Hello", "A\nb")),
    ("think", "Hello</think>", found("Hello</think>")),
    ("think", " Hello", found(" Hello")),
    ("think", f"<think>x</think>\n{CALL_OSLO}", found("", "x", [OSLO])),
    ("think", "<think>cut o", found("", "cut o")),
    ("think-open", "A</think>Hello", found("Hello", "A")),
    ("think-open", "<think>A</think>Hello", found("Hello", "A")),
    ("think-open", "cut of", found("", "cut of")),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_what_is_found(name: str, text: str, expected: Found) -> None:
    assert parse(PARSERS[name](), [text]) == expected
    assert parse(PARSERS[name](), text) == expected, "a character at a time"


# Text that looks like something: whole and broken pieces of every format.
PIECES = [
    *(text for _, text, _ in CASES),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", CALL_BEGIN, CALL_END, SEPARATOR),
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "analysis", "<think>"),
    *("</think>", "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>"),
    *("</arg_key>", "<arg_value>", "</arg_value>", '{"name": ', '"f"', ', "arguments": ', "{", "}"),
    *("[", "]", '"', "\\", "\n", " ", "to=functions.f", "get_weather", ">", "```json\n", "1e5"),
]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.text(max_size=5),
        st.builds(lambda s, n: s[:n], st.sampled_from(PIECES), st.integers(0, 60)),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60 if EVERY_CASE else 25, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=12))
@example(text="<tool_call>" * 3, cuts=[1, 12])
def test_pieces_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    whole = parse(PARSERS[name](), [text])
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert parse(PARSERS[name](), pieces) == whole
    assert parse(PARSERS[name](), text) == whole, "a character at a time"


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=40 if EVERY_CASE else 20, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), max_size=6))
def test_pieces_of_a_cut_answer_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    whole = parse(PARSERS[name](), [text], is_cut=True)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert parse(PARSERS[name](), pieces, is_cut=True) == whole
    assert parse(PARSERS[name](), text, is_cut=True) == whole, "a character at a time"


@pytest.mark.parametrize("name", [n for n in PARSERS if "openai" not in n and "think" not in n])
@settings(max_examples=40 if EVERY_CASE else 20, deadline=None)
@given(text=TEXTS)
def test_without_a_call_no_text_is_lost(name: str, text: str) -> None:
    result = parse(PARSERS[name](), [text])
    if not result["calls"]:
        for layout in (CALLS_BEGIN, CALLS_END) if "deepseek" in name else ():
            text = text.replace(layout, "")
        assert result["content"] == text


ADVERSARIES = {
    "hermes": ["<", "<tool_call>", " ", '<tool_call>{"name":"f","arguments":[', '{"a":"\\'],
    "qwen3_xml": ["<function=", "<function=f><parameter=city>", "\n</parameter"],
    "glm45": ["<tool_call>a", "<tool_call>a<arg_key>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][{", "[TOOL_CALLS]a"],
    "deepseek_v3": [CALL_BEGIN, "<\uff5c"],
    "openai": ["<|channel|>", "<|message|>", "<|start|>a"],
    "think": ["<think>\n", "\n"],
}


@pytest.mark.parametrize("name", ADVERSARIES)
def test_a_hostile_answer_costs_what_its_length_says(name: str) -> None:
    """The unread rest is only a part of a marker, so no text is scanned again and again."""
    for unit in ADVERSARIES[name]:
        parser = PARSERS[name]()
        assert isinstance(parser, ReadingParser)
        for char in unit * (10_000 // len(unit)):
            parser.push(char)
            reader = parser._reader
            assert len(reader._text) - reader._pos < 40
        parser.finish()


def test_only_the_first_call_if_calls_are_not_parallel() -> None:
    parser = HermesParser(Outbox(max_calls=1))
    assert parse(parser, [CALL_OSLO * 3 + "end"]) == found("end", calls=[OSLO])


def test_arguments_stream_as_they_come() -> None:
    parser = HermesParser(outbox())
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "x')
    (call,) = parser.push("yz").calls
    assert call.arguments == "yz"
    assert call.name is None


def test_a_text_argument_streams_and_ends_as_json() -> None:
    parser = QwenXmlParser(outbox(), TOOLS)
    parser.push("<function=get_weather><parameter=city>\nO")
    (call,) = parser.push('s"lo').calls
    assert call.arguments == 's\\"lo'
    parser.push("\n</parameter></function>")
    whole = parse(QwenXmlParser(outbox(), TOOLS), [XML_PARIS])
    assert json.loads(whole["calls"][0][1]) == {"city": "Paris", "days": 3}
