"""Checks a constraint's size, depth and shape without compiling it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from moe_serve.engine.request.constraint import Constraint
from moe_serve.engine.request.structural_tag import StructuralTagError, read_structural_tag
from moe_serve.engine.sampling.grammar.compiler import refusal
from moe_serve.engine.sampling.grammar.limits import MAX_CHOICES, MAX_DEPTH, MAX_NODES
from moe_serve.json_text import parse_json

_OPEN, _CLOSE = "([{", ")]}"
# Up to the string's end or the text's: a failed match would be tried again from every quote in
# it.
STRING = re.compile(r'"[^"\\]*(?:\\.?[^"\\]*)*"?', re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)


def check_source(constraint: Constraint) -> None:
    """Checks a constraint cheaply, on any thread. Raises InvalidGrammarError."""
    source, kind = constraint.source, constraint.kind
    depth = _depth(constraint)
    if depth > MAX_DEPTH:
        raise refusal(constraint, f"its brackets are nested {depth} deep, at most {MAX_DEPTH} are")
    if kind == "json_object":
        return
    if not (source if kind == "regex" else source.strip()):  # a pattern may be a line break
        raise refusal(constraint, "it is empty")
    if kind not in ("json_schema", "choice", "structural_tag"):
        return
    try:
        value = parse_json(source)
    except ValueError as error:
        raise refusal(constraint, f"it is not valid JSON: {error}") from None
    if kind == "choice":
        _check_choices(constraint, value)
    elif not isinstance(value, dict | bool):
        raise refusal(constraint, "it must be an object")
    elif kind == "structural_tag":
        _check_tags(constraint)
    elif (count := _num_nodes(value)) > MAX_NODES:
        raise refusal(constraint, f"it has {count} values, at most {MAX_NODES} are allowed")


def _check_choices(constraint: Constraint, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
        raise refusal(constraint, "it must be a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise refusal(constraint, f"it must hold 1 to {MAX_CHOICES} choices, got {len(value)}")
    if not any(value):
        raise refusal(constraint, "it has no choice but the empty one")


def _check_tags(constraint: Constraint) -> None:
    try:
        tags = read_structural_tag(constraint.source).tags
    except StructuralTagError as error:
        raise refusal(constraint, str(error), error.place) from None
    for tag in tags:
        if (depth := _schema_depth(tag.schema)) > MAX_DEPTH:
            reason = f"{tag.schema_place} is nested {depth} deep, at most {MAX_DEPTH} are allowed"
            raise refusal(constraint, reason, tag.schema_place)
    if (count := sum(_num_nodes(tag.schema) for tag in tags)) > MAX_NODES:
        raise refusal(constraint, f"its schemas have {count} values, at most {MAX_NODES} may be")


def _depth(constraint: Constraint) -> int:
    """Returns the depth of brackets outside strings and escapes."""
    is_json = constraint.kind in ("json_schema", "choice", "structural_tag")
    return _brackets(constraint.source, STRING if is_json else _ESCAPE)


def _schema_depth(schema: Mapping[str, Any]) -> int:
    try:
        return _brackets(json.dumps(schema), STRING)
    except RecursionError:
        return sys.getrecursionlimit()


def _brackets(source: str, left_out: re.Pattern[str]) -> int:
    depth = deepest = 0
    for char in left_out.sub("", source):
        if char in _OPEN:
            depth += 1
            deepest = max(deepest, depth)
        elif char in _CLOSE and depth:
            depth -= 1
    return deepest


def _num_nodes(value: Any) -> int:
    count, rest = 0, [value]
    while rest:
        item = rest.pop()
        count += 1
        if isinstance(item, dict):
            rest += item.values()
        elif isinstance(item, list):
            rest += item
    return count
