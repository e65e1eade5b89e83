"""Knows the formats by name, and builds a request's parser from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from moe_serve.text.assistant import (
    call_formats,
    deepseek_format,
    format_grammars,
    harmony_format,
)
from moe_serve.text.assistant.format_grammars import Spelling, harmony_lead, thinking_lead
from moe_serve.text.assistant.outbox import Outbox, new_call_id
from moe_serve.text.assistant.parser import AssistantParser, PlainParser, ThinkingParser
from moe_serve.text.assistant.tool import Tool


@dataclass(frozen=True, slots=True)
class ThoughtEnds:
    """The markers of reasoning.

    `closings`: the markers with which a model ends it. The first one ends reasoning that has lasted
    too long, and `following` then opens the next part. `can_reopen`: reasoning may begin anywhere,
    and more than once; otherwise only at the start of the answer.
    """

    opening: str
    closings: tuple[str, ...]
    following: str = ""
    can_reopen: bool = False


MakeToolParser = Callable[[Outbox, Mapping[str, Tool]], AssistantParser]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A model family's format of calls.

    `markers` may be special tokens, which are then kept in the text.
    """

    markers: tuple[str, ...]
    make: MakeToolParser
    write_calls: format_grammars.WriteCalls
    make_id: Callable[[], str] = new_call_id
    is_harmony: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The markers around the reasoning.

    `is_open`: it begins without one, unless the prompt indicates otherwise. `is_off`: the request
    turns reasoning off.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    is_open: bool = False
    is_harmony: bool = False
    is_off: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony_format.MARKERS if self.is_harmony else (self.opening, self.closing)

    def within(self, begun: str) -> ReasoningFormat:
        """Returns the format for an answer that continues this text."""
        is_open = self.opening in begun and self.closing not in begun
        return replace(self, is_open=is_open)

    def is_open_after(self, prompt: str) -> bool:
        """Returns whether an answer to this prompt begins with reasoning, or with its opening
        marker.
        """
        end = prompt[-64:].rstrip()
        if end.endswith(self.opening):
            return True
        return self.is_open and not end.endswith(self.closing)

    def is_over_after(self, prompt: str) -> bool:
        """Returns whether the answer itself comes next, because reasoning can no longer begin."""
        if self.is_harmony or self.is_open_after(prompt):
            return False
        return self.is_off or prompt[-64:].rstrip().endswith(self.closing)

    def ends(self, *, can_call: bool) -> ThoughtEnds:
        """Returns the markers that end the reasoning.

        `can_call`: a call may follow, so the model chooses the head of the next message.
        """
        if not self.is_harmony:
            return ThoughtEnds(self.opening, (self.closing,))
        begun = harmony_format.START + "assistant"
        following = (
            begun if can_call else begun + harmony_format.CHANNEL + "final" + harmony_format.MESSAGE
        )
        opening = harmony_format.CHANNEL + "analysis" + harmony_format.MESSAGE
        return ThoughtEnds(opening, harmony_format.BODY_ENDS, following, can_reopen=True)

    def is_part_of(self, grammar: str) -> bool:
        """Returns whether a grammar itself states what comes after the reasoning."""
        return (harmony_format.MESSAGE if self.is_harmony else self.closing) in grammar


def _harmony_parser(outbox: Outbox, _: Mapping[str, Tool]) -> AssistantParser:
    return harmony_format.HarmonyParser(outbox, has_tools=True, has_reasoning=True)


def _deepseek(has_code_block: bool) -> MakeToolParser:
    return lambda out, _: deepseek_format.DeepSeekParser(out, has_code_block=has_code_block)


_DEEPSEEK_MARKERS = (
    *(deepseek_format.CALLS_BEGIN, deepseek_format.CALLS_END),
    *(deepseek_format.CALL_BEGIN, deepseek_format.CALL_END, deepseek_format.SEPARATOR),
)
_HERMES = ToolFormat(
    markers=(call_formats.OPEN, call_formats.CLOSE),
    make=lambda out, _: call_formats.HermesParser(out),
    write_calls=format_grammars.hermes_calls,
)
_QWEN_XML = ToolFormat(
    markers=(call_formats.OPEN, call_formats.CLOSE),
    make=call_formats.QwenXmlParser,
    write_calls=format_grammars.qwen_xml_calls,
)
_GLM = ToolFormat(
    markers=(
        call_formats.OPEN,
        call_formats.CLOSE,
        call_formats.KEY,
        call_formats.END_KEY,
        call_formats.VALUE,
        call_formats.END_VALUE,
    ),
    make=call_formats.GlmParser,
    write_calls=format_grammars.glm_calls,
)
_HARMONY = ToolFormat(
    markers=harmony_format.MARKERS,
    make=_harmony_parser,
    write_calls=format_grammars.harmony_calls,
    is_harmony=True,
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "deepseek_v3": ToolFormat(
        markers=_DEEPSEEK_MARKERS,
        make=_deepseek(True),
        write_calls=format_grammars.deepseek_v3_calls,
    ),
    "deepseek_v31": ToolFormat(
        markers=_DEEPSEEK_MARKERS,
        make=_deepseek(False),
        write_calls=format_grammars.deepseek_v31_calls,
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "mistral": ToolFormat(
        markers=(call_formats.CALLS, call_formats.CALL_ID, call_formats.ARGS),
        make=lambda out, _: call_formats.MistralParser(out),
        write_calls=format_grammars.mistral_calls,
        make_id=call_formats.new_mistral_id,
    ),
    "openai": _HARMONY,
    "gpt-oss": _HARMONY,
}
_THINK = ReasoningFormat()
_CHANNELS = ReasoningFormat(is_harmony=True)
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(is_open=True),
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "mistral": ReasoningFormat(opening="[THINK]", closing="[/THINK]"),
    "openai_gptoss": _CHANNELS,
    "gpt-oss": _CHANNELS,
}


def tool_format_of(template: str) -> str | None:
    """Returns the name of the format that a chat template uses, by the markers in its text."""
    if harmony_format.CHANNEL in template and harmony_format.MESSAGE in template:
        return "openai"
    if deepseek_format.CALL_BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    for marker, name in (
        (call_formats.KEY, "glm45"),
        (call_formats.FUNCTION, "qwen3_coder"),
        (call_formats.CALLS, "mistral"),
        (call_formats.OPEN, "hermes"),
    ):
        if marker in template:
            return name
    return None


def reasoning_format_of(template: str) -> str | None:
    """Returns the reasoning format of a chat template in the same way; each prompt's end then tells
    whether reasoning has begun.
    """
    if harmony_format.CHANNEL in template and harmony_format.MESSAGE in template:
        return "openai_gptoss"
    if "[THINK]" in template:
        return "mistral"
    return "qwen3" if "</think>" in template else None


class GrammarScope(Enum):
    """The part of the answer that a request's grammar covers."""

    ALL = auto()  # the text from its first token on: there is no reasoning
    ANSWER = auto()  # exactly the text after the reasoning
    JSON = auto()  # the same, and line breaks between the two are layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserPlan:
    """The configuration of one request's parsers; each choice gets its own parser from `make`.

    `tools` None: no text is parsed as a call. `prompt` is the text that the answers continue.
    `scope`: of the request's own grammar; None without one, or if it includes reasoning.
    `is_forced`: the answer must be calls.
    """

    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    tools: Mapping[str, Tool] | None = None
    max_calls: int | None = None
    prompt: str = ""
    scope: GrammarScope | None = None
    is_forced: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """The markers that must stay in the text, even if they are special tokens."""
        formats = (self._called_format, self.reasoning_format)
        return frozenset(marker for form in formats if form is not None for marker in form.markers)

    @property
    def looks_for_calls(self) -> bool:
        return self._called_format is not None

    def make(self) -> AssistantParser:
        called, reasoning = self._called_format, self.reasoning_format
        make_id = new_call_id if called is None else called.make_id
        is_harmony = bool(reasoning and reasoning.is_harmony)
        speaks_harmony = is_harmony or (called is not None and called.is_harmony)
        # Harmony's reasoning is content for clients that do not want it separated.
        has_calls_only = self.is_forced and (is_harmony or not speaks_harmony)
        outbox = Outbox(make_id, self.max_calls, has_calls_only=has_calls_only)
        if speaks_harmony:
            return harmony_format.HarmonyParser(
                outbox, has_tools=called is not None, has_reasoning=is_harmony
            )
        answer = PlainParser() if called is None else called.make(outbox, self.tools or {})
        if reasoning is None or self.scope is GrammarScope.ALL:
            return answer
        return ThinkingParser(
            answer,
            reasoning.opening,
            reasoning.closing,
            is_open=reasoning.is_open_after(self.prompt),
            keeps_space=self.scope is GrammarScope.ANSWER,
        )

    def forced_grammar(self, called: Sequence[Tool], special_ids: Mapping[str, int]) -> str:
        """Builds a grammar under which the answer is one or more calls of these functions."""
        assert self.tool_format is not None, "calls are forced in a known format"
        is_parallel = self.max_calls is None
        rules = self.tool_format.write_calls(called, Spelling(special_ids), is_parallel)
        return "\n".join(rules) + "\n"

    def call_lead(self, special_ids: Mapping[str, int]) -> str:
        """Builds a grammar of the text before forced calls; "" if calls come first."""
        assert self.tool_format is not None, "calls are forced in a known format"
        spell, reasoning = Spelling(special_ids), self.reasoning_format
        if self.tool_format.is_harmony:
            is_off = reasoning is not None and reasoning.is_off
            return harmony_lead(spell, has_analysis=not is_off, is_final=False)
        if reasoning is None or reasoning.is_harmony or reasoning.is_over_after(self.prompt):
            return ""
        return self._thinking_lead(reasoning, spell)

    def answer_lead(self, special_ids: Mapping[str, int]) -> str:
        """Builds a grammar of the text before an answer that follows a grammar; "" if the answer
        comes first."""
        spell, reasoning = Spelling(special_ids), self.reasoning_format
        if reasoning is None or self.scope in (None, GrammarScope.ALL):
            return ""
        if reasoning.is_harmony:
            return harmony_lead(spell, has_analysis=not reasoning.is_off, is_final=True)
        called = self._called_format
        if called is not None and called.is_harmony:
            return ""  # one parser does both, and knows no other reasoning format
        return self._thinking_lead(reasoning, spell)

    def _thinking_lead(self, reasoning: ReasoningFormat, spell: Spelling) -> str:
        return thinking_lead(
            reasoning.opening,
            reasoning.closing,
            spell,
            is_open=reasoning.is_open_after(self.prompt),
            has_layout=self.scope is not GrammarScope.ANSWER,
        )

    @property
    def _called_format(self) -> ToolFormat | None:
        return None if self.tools is None else self.tool_format
