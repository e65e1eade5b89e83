"""Builds grammars in llguidance's Lark dialect: a forced call in each format, and the reasoning.

In a grammar of the reasoning before an answer, @answer stands for the grammar of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.text.assistant import (
    call_formats,
    deepseek_format,
    harmony_format,
)
from moe_serve.text.assistant.tool import Tool, is_text

MAX_CALLS = 16  # of one forced answer
# Without it an undecided model writes white space until the end.
_LAYOUT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}

_LINE_BREAKS = r'"\n"{0,2}'  # around reasoning; the parser drops them


@dataclass(frozen=True, slots=True)
class Spelling:
    """Writes a marker as text, or as a special token if it is one."""

    special_ids: Mapping[str, int]

    def __call__(self, text: str) -> str:
        special = self.special_ids.get(text)
        return quoted(text) if special is None else f"<[{special}]>"


WriteCalls = Callable[[Sequence[Tool], Spelling, bool], list[str]]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_up_to(name: str, end: str, spell: Spelling) -> list[str]:
    """Returns rules for any text and the marker that ends it.

    If the marker is a special token, ordinary tokens must not spell it: parsers read text and would
    take it for the end.
    """
    if end not in spell.special_ids:
        return [f"{name}[suffix={quoted(end)}]: /(?s:.*)/"]
    spelt = re.escape(end).replace("/", r"\/")
    text = f"{name}_text".upper()
    return [f"{name}: {text} {spell(end)}", f"{text}: /(?s:.*)/ & ~/(?s:.*{spelt}.*)/"]


def json_rule(schema: Mapping[str, Any]) -> str:
    layout = {**schema, "x-guidance": _LAYOUT}
    return "%json " + json.dumps(layout, ensure_ascii=False)


def hermes_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    rules = _alternatives(tools, is_parallel, '"\\n"')
    opening, closing = spell(call_formats.OPEN), spell(call_formats.CLOSE)
    for i, tool in enumerate(tools):
        head = quoted(f'\n{{"name": {quoted(tool.name)}, "arguments": ')
        tail = quoted("}\n")
        rules.append(f"call_{i}: {opening} {head} args_{i} {tail} {closing}")
        rules.append(f"args_{i}: {json_rule(tool.parameters)}")
    return rules


def mistral_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    """Builds the newer form if the vocabulary has its marker, else the older one, a list."""
    is_newer = call_formats.ARGS in spell.special_ids
    rules = _alternatives(tools, is_parallel, "" if is_newer else '", "')
    if not is_newer:
        rules[0] = f'start: {spell(call_formats.CALLS)} "[" calls "]"'
    for i, tool in enumerate(tools):
        if is_newer:
            parts = [
                spell(call_formats.CALLS),
                quoted(tool.name),
                spell(call_formats.ARGS),
                f"args_{i}",
            ]
        else:
            head = f'{{"name": {quoted(tool.name)}, "arguments": '
            parts = [quoted(head), f"args_{i}", '"}"']
        rules.append(f"call_{i}: {' '.join(parts)}")
        rules.append(f"args_{i}: {json_rule(tool.parameters)}")
    return rules


def deepseek_v3_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    heads = [f"{tool.name}\n```json\n" for tool in tools]
    return _deepseek_calls(tools, spell, is_parallel, ("function", heads, "\n```"))


def deepseek_v31_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    return _deepseek_calls(tools, spell, is_parallel, (None, [], ""))


def _deepseek_calls(
    tools: Sequence[Tool],
    spell: Spelling,
    is_parallel: bool,
    form: tuple[str | None, list[str], str],
) -> list[str]:
    kind, heads, tail = form
    rules = _alternatives(tools, is_parallel, '"\\n"' if kind else "")
    rules[0] = (
        f"start: {spell(deepseek_format.CALLS_BEGIN)} calls {spell(deepseek_format.CALLS_END)}"
    )
    for i, tool in enumerate(tools):
        parts = [
            spell(deepseek_format.CALL_BEGIN),
            quoted(kind or tool.name),
            spell(deepseek_format.SEPARATOR),
        ]
        parts += [quoted(heads[i])] if heads else []
        parts += [f"args_{i}", *([quoted(tail)] if tail else []), spell(deepseek_format.CALL_END)]
        rules.append(f"call_{i}: {' '.join(parts)}")
        rules.append(f"args_{i}: {json_rule(tool.parameters)}")
    return rules


def harmony_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    """Builds the grammar of one call, which ends the answer."""
    rules = _alternatives(tools, False, "")
    for i, tool in enumerate(tools):
        head = quoted(f"commentary to=functions.{tool.name} ")
        parts = [spell(harmony_format.CHANNEL), head, spell(harmony_format.CONSTRAIN), '"json"']
        rules.append(f"call_{i}: {' '.join(parts)} {spell(harmony_format.MESSAGE)} args_{i}")
        rules.append(f"args_{i}: {json_rule(tool.parameters)}")
    return rules


def qwen_xml_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    rules = _alternatives(tools, is_parallel, '"\\n"')
    for i, tool in enumerate(tools):
        head, tail = (
            quoted(f"\n<function={tool.name}>\n"),
            quoted(call_formats.END_FUNCTION + "\n"),
        )
        names = " ".join(_argument_names(i, tool))
        begin, close = spell(call_formats.OPEN), spell(call_formats.CLOSE)
        rules.append(f"call_{i}: {begin} {head} {names} {tail} {close}")
        for k, key in enumerate(tool.properties):
            opening = quoted(f"{call_formats.PARAMETER}{key}>\n")
            rules.append(f'arg_{i}_{k}: {opening} value_{i}_{k} "\\n"')
            # A text ends with the marker, with or without a line break before it: the parser ends
            # it there.
            before = "" if _is_free_text(tool.properties[key]) else "\n"
            end = before + call_formats.END_PARAMETER
            rules += _value_rules(f"value_{i}_{k}", tool, key, end, spell)
    return rules


def glm_calls(tools: Sequence[Tool], spell: Spelling, is_parallel: bool) -> list[str]:
    rules = _alternatives(tools, is_parallel, '"\\n"')
    for i, tool in enumerate(tools):
        names = " ".join(_argument_names(i, tool))
        head = quoted(tool.name + "\n")
        rules.append(
            f"call_{i}: {spell(call_formats.OPEN)} {head} {names} {spell(call_formats.CLOSE)}"
        )
        for k, key in enumerate(tool.properties):
            parts = [
                spell(call_formats.KEY),
                quoted(key),
                spell(call_formats.END_KEY),
                '"\\n"',
                spell(call_formats.VALUE),
            ]
            rules.append(f'arg_{i}_{k}: {" ".join(parts)} value_{i}_{k} "\\n"')
            rules += _value_rules(f"value_{i}_{k}", tool, key, call_formats.END_VALUE, spell)
    return rules


def _alternatives(tools: Sequence[Tool], is_parallel: bool, between: str) -> list[str]:
    """Builds one call of any function; with `is_parallel` up to MAX_CALLS."""
    names = " | ".join(f"call_{i}" for i in range(len(tools)))
    more = f" ({between} call){{0,{MAX_CALLS - 1}}}" if is_parallel else ""
    return ["start: calls", f"calls: call{more}", f"call: {names}"]


def _argument_names(index: int, tool: Tool) -> list[str]:
    """Returns argument names in the order of the schema; optional arguments may be left out."""
    required = tool.required
    return [
        f"arg_{index}_{k}" + ("" if key in required else "?")
        for k, key in enumerate(tool.properties)
    ]


def _value_rules(name: str, tool: Tool, key: str, end: str, spell: Spelling) -> list[str]:
    schema = tool.properties[key]
    if _is_free_text(schema):
        return text_up_to(name, end, spell)
    if is_text(schema):
        options = " | ".join(quoted(option) for option in schema["enum"])
        return [f"{name}: ({options}) {spell(end)}"]
    defined = {part: tool.parameters[part] for part in _DEFINITIONS if part in tool.parameters}
    value = {**defined, **schema} if isinstance(schema, Mapping) else defined
    return [f"{name}: json_{name} {spell(end)}", f"json_{name}: {json_rule(value)}"]


def _is_free_text(schema: Any) -> bool:
    return is_text(schema) and not isinstance(schema.get("enum"), list)


_DEFINITIONS = ("$defs", "definitions")


def thinking_lead(
    opening: str, closing: str, spell: Spelling, *, is_open: bool, has_layout: bool
) -> str:
    """Builds the grammar of reasoning between two markers.

    `is_open`: it has begun and must be closed; otherwise it may begin. `has_layout`: line breaks
    that are not part of the answer may follow it.
    """
    thought = f"thought {_LINE_BREAKS}" if has_layout else "thought"
    if not is_open:
        reason = f"({_LINE_BREAKS} {spell(opening)} {thought})?"
    elif opening in spell.special_ids:
        reason = f"{spell(opening)}? {thought}"  # ordinary text cannot spell the marker
    else:
        reason = thought
    return _lines(
        "start: reason @answer", f"reason: {reason}", *text_up_to("thought", closing, spell)
    )


def harmony_lead(spell: Spelling, *, has_analysis: bool, is_final: bool) -> str:
    """Builds the grammar for harmony.

    `is_final`: the answer is a message of the channel `final`; otherwise it contains its own heads.
    """
    analysis = " ".join(map(spell, (harmony_format.CHANNEL, "analysis", harmony_format.MESSAGE)))
    final = " ".join(map(spell, (harmony_format.CHANNEL, "final", harmony_format.MESSAGE)))
    parts = ["analysis?"] if has_analysis else []
    parts += [final] if is_final else []
    rules = [f"start: {' '.join([*parts, '@answer'])}"]
    if has_analysis:
        rules.append(f'analysis: {analysis} thought {spell(harmony_format.START)} "assistant"')
        rules += text_up_to("thought", harmony_format.END, spell)
    return _lines(*rules)


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
