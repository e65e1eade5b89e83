"""Chooses the parsers for the answers: from the configuration, else from the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_serve.config.sections import ServerConfig
from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.sampling.grammar.schema_rules import SchemaRuleError, prepared_source
from moe_serve.errors import InvalidGrammarError, InvalidRequestError
from moe_serve.http.generation.chat_request import Chat
from moe_serve.http.generation.served_model import ServedModel
from moe_serve.http.schema.tool_fields import tools_by_name
from moe_serve.text.assistant.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    GrammarScope,
    ParserPlan,
    ReasoningFormat,
    ToolFormat,
    reasoning_format_of,
    tool_format_of,
)
from moe_serve.text.assistant.tool import Tool

_SENDER = ("message.name", "message['name']", 'message["name"]')


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantFormats:
    """The formats of the served model. None: it does not reason, or its call format is not
    known."""

    tools: ToolFormat | None = None
    tool_parser: str | None = None  # the name of that format
    reasoning: ReasoningFormat | None = None
    # a grammar applies from the first token, to the reasoning too
    grammar_in_reasoning: bool = False

    def check(self, chat: Chat, model: ServedModel) -> list[str]:
        """Refuses tools that this model does not support; returns the fields that have no
        effect."""
        template = model.require_chat_template()
        if chat.called_tools:
            if self.tools is None:
                raise _unsupported(
                    f"The tool call format of {model.name!r} was not recognised in its chat "
                    "template. Set server.tool_parser to serve requests with tools."
                )
            if not template.mentions("tools"):
                raise _unsupported(f"The chat template of {model.name!r} does not support tools.")
        names = [name for name in chat.template_kwargs if not template.mentions(name)]
        ignored = [f"chat_template_kwargs.{name}" for name in names]
        switches = ("reasoning_effort", "enable_thinking", "thinking")
        heeded = switches if chat.reasoning_effort == "none" else switches[:1]
        if chat.reasoning_effort is not None and not any(map(template.mentions, heeded)):
            ignored.append("reasoning_effort")
        has_thoughts = any(map(template.mentions, ("reasoning_content", "reasoning", "thinking")))
        for i, message in enumerate(chat.messages):
            unheeded = [] if any(name in template.source for name in _SENDER) else ["name"]
            unheeded += [] if has_thoughts else ["reasoning", "reasoning_content"]
            ignored += [f"messages.{i}.{n}" for n in unheeded if getattr(message, n) is not None]
        return ignored

    def plan(self, chat: Chat, constraint: Constraint | None, prompt: str) -> ParserPlan:
        """Plans the parsing of an answer to this prompt. `constraint` is its own grammar."""
        reasoning = self.reasoning_of(chat) if chat.separates_reasoning else None
        return ParserPlan(
            tool_format=self.tools,
            reasoning_format=reasoning,
            tools=tools_by_name(chat.called_tools) if chat.called_tools else None,
            max_calls=None if chat.is_parallel and not chat.named_tool else 1,
            prompt=prompt,
            scope=self._scope(chat, constraint, reasoning, prompt),
            is_forced=chat.forces_call,
        )

    def reasoning_of(self, chat: Chat) -> ReasoningFormat | None:
        """Returns the reasoning format of the answer, as far as the request determines it."""
        reasoning = self.reasoning
        if reasoning is not None and chat.is_thinking_off:
            reasoning = replace(reasoning, is_off=True)
        if reasoning is not None and chat.continues:
            reasoning = reasoning.within(str(chat.messages[-1].content))
        return reasoning

    def _scope(
        self,
        chat: Chat,
        constraint: Constraint | None,
        reasoning: ReasoningFormat | None,
        prompt: str,
    ) -> GrammarScope | None:
        """Returns the part of the answer that its grammar describes.

        None if there is no grammar, or if the grammar itself describes the reasoning.
        """
        if constraint is None or reasoning is None:
            return None
        is_json = constraint.kind in ("json_object", "json_schema")
        if not is_json and reasoning.is_part_of(constraint.source):
            return None
        has_begun = chat.continues and not reasoning.is_open
        if self.grammar_in_reasoning or has_begun or reasoning.is_over_after(prompt):
            return GrammarScope.ALL
        return GrammarScope.JSON if is_json else GrammarScope.ANSWER


def assistant_formats(model: ServedModel, config: ServerConfig) -> AssistantFormats:
    source = "" if model.chat_template is None else model.chat_template.source
    tools, reasoning = config.tool_parser, config.reasoning_parser
    tool_name = tool_format_of(source) if tools == "auto" else tools
    reasoning_name = reasoning_format_of(source) if reasoning == "auto" else reasoning
    return AssistantFormats(
        tools=TOOL_FORMATS.get(tool_name or "none"),
        tool_parser=tool_name if tool_name in TOOL_FORMATS else None,
        reasoning=REASONING_FORMATS.get(reasoning_name or "none"),
        grammar_in_reasoning=config.grammar_in_reasoning,
    )


def answer_constraint(
    chat: Chat, own: Constraint | None, plan: ParserPlan, special_ids: Mapping[str, int]
) -> Constraint | None:
    """Returns the grammar of the answer: that of a forced call, or the request's `own` one with the
    reasoning that may or must come first."""
    if chat.forces_call:
        return _forced_call(chat, own, plan, special_ids)
    return None if own is None else replace(own, lead=plan.answer_lead(special_ids))


def _forced_call(
    chat: Chat, own: Constraint | None, plan: ParserPlan, special_ids: Mapping[str, int]
) -> Constraint:
    assert plan.tools is not None, "a forced call needs tools"
    if own is not None:
        raise InvalidRequestError(
            "tool_choice forces a call, so the answer cannot follow another grammar as well. "
            "Remove the other grammar or tool_choice.",
            param="tool_choice",
        )
    name = chat.named_tool
    called = [plan.tools[name]] if name else list(plan.tools.values())
    for tool in called:
        _check_schema(tool)
    grammar, lead = plan.forced_grammar(called, special_ids), plan.call_lead(special_ids)
    return Constraint(kind="lark", source=grammar, lead=lead)


def _check_schema(tool: Tool) -> None:
    """Checks the schema of one tool. Once the schemas are merged, an error could not name the
    tool."""
    try:
        prepared_source(json.dumps(tool.parameters))
    except SchemaRuleError as error:
        raise InvalidGrammarError(
            f"A call of {tool.name!r:.100} cannot be forced: {error}, or use tool_choice 'auto'.",
            param="tools",
        ) from None


def _unsupported(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tools", code="tools_not_supported")
