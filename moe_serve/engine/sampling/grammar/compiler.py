"""Compiles constraints into matchers, within the library's limits."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from moe_serve.engine.request.constraint import ANSWER, Constraint
from moe_serve.engine.request.structural_tag import StructuralTagError, read_structural_tag
from moe_serve.engine.sampling.grammar.limits import MAX_REASON_CHARS, parser_limits
from moe_serve.engine.sampling.grammar.schema_rules import prepared_lark, prepared_source
from moe_serve.engine.sampling.grammar.tag_grammar import tag_grammar
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.errors import InvalidGrammarError

# Between the parts of JSON: a space, or a new line and its indent. Without a bound, an unsure
# model writes spaces to the end.
_WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,24})"
_KINDS = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "Lark grammar",
    "gbnf": "GBNF grammar",
    "structural_tag": "structural tag",
}


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """Compiles a constraint. Raises InvalidGrammarError if it is invalid, too large, or allows
    nothing.

    The part after a lead is also compiled alone, as the lead always allows something.
    """
    grammar = grammar_of(constraint, vocabulary)
    matcher = _compiled(constraint, grammar, vocabulary)
    if not constraint.lead:
        return matcher
    answer = {**json.loads(grammar)["grammars"][0], "name": ANSWER.removeprefix("@")}
    led = {"grammars": [{"lark_grammar": constraint.lead}, answer]}
    return _compiled(constraint, json.dumps(led), vocabulary)


def check_parts(constraint: Constraint, vocabulary: Vocabulary) -> None:
    """Compiles every schema of a structural tag alone, as the free text around it always allows
    something. Raises InvalidGrammarError with the schema's place."""
    if constraint.kind != "structural_tag":
        return
    seen: set[str] = set()
    for tag in read_structural_tag(constraint.source).tags:
        source = json.dumps(tag.schema)
        if source in seen:
            continue
        seen.add(source)
        schema = Constraint("json_schema", source)
        try:
            _compiled(schema, grammar_of(schema, vocabulary), vocabulary)
        except InvalidGrammarError as error:
            raise InvalidGrammarError(
                f"{tag.schema_place}: {error}", place=tag.schema_place
            ) from None


def _compiled(constraint: Constraint, grammar: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(
        vocabulary.tokenizer, grammar, log_level=0, limits=parser_limits(len(vocabulary.tokens))
    )
    # Computed once: every copy of the matcher has the first mask in its cache.
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise refusal(constraint, matcher.get_error() or "it allows no token at all")
    return matcher


def grammar_of(constraint: Constraint, vocabulary: Vocabulary) -> str:
    """Returns the constraint, without its lead, as a grammar of the library."""
    source = constraint.source
    try:
        if constraint.kind == "json_object":
            return _of_schema('{"type":"object"}')
        if constraint.kind == "json_schema":
            return _of_schema(prepared_source(source))
        if constraint.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        if constraint.kind == "choice":
            choices = [json.dumps(text, ensure_ascii=False) for text in json.loads(source)]
            lark = "start: " + " | ".join(choices)
            return _of_lark(lark.replace("\x7f", r"\u007f"))  # Lark's strings hold no DEL
        if constraint.kind == "structural_tag":
            return _of_lark(
                tag_grammar(read_structural_tag(constraint.source), vocabulary, _WHITESPACE)
            )
        return _of_lark(prepared_lark(lark_of(constraint).source))
    except StructuralTagError as error:
        raise refusal(constraint, str(error), error.place) from None
    except ValueError as error:
        raise refusal(constraint, str(error)) from None


def lark_of(constraint: Constraint) -> Constraint:
    """Converts a GBNF grammar to Lark; other constraints are returned unchanged. Runs in a process
    that can be ended."""
    if constraint.kind != "gbnf":
        return constraint
    try:
        return replace(constraint, kind="lark", source=any_to_lark(constraint.source))
    except RecursionError:
        raise refusal(constraint, "it is nested too deeply") from None
    except Exception as error:  # the converter raises many kinds of errors
        raise refusal(constraint, str(error)) from None


def refusal(constraint: Constraint, reason: str, place: str = "") -> InvalidGrammarError:
    """Builds the error, with the beginning of the library's reason."""
    lines = reason.partition("<state>")[0].split("\n")
    first = lines[0]
    if "regex parse error" in first:  # the reason comes last, after a drawing
        first = next((line for line in reversed(lines) if line.startswith("error:")), first)
    if first.startswith("NoExtension"):
        first = "it allows no answer at all, such as one that only refers to itself"
    shown = re.sub(r"\s+", " ", first).strip().rstrip(".")
    if len(shown) > MAX_REASON_CHARS:
        shown = shown[:MAX_REASON_CHARS] + "..."
    return InvalidGrammarError(
        f"This {_KINDS[constraint.kind]} cannot be used: {shown or 'no reason is known'}.",
        place=place,
    )


def _of_schema(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": _WHITESPACE, "coerce_one_of": True}
    )


def _of_lark(grammar: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})
