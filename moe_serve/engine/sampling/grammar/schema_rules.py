"""Adapts JSON schemas to the grammar library.

Parts that the library would break silently are narrowed or refused, annotations that it does not
know are dropped, and clients cannot set the library's own options.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, TypeGuard

# The formats that the library enforces; JSON Schema treats all others as annotations.
KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname"}
    | {"ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_OPTIONS = "x-guidance"
_LAYOUT_OPTIONS = ("whitespace_flexible", "whitespace_pattern", "key_separator", "item_separator")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_VALUES = frozenset({"const", "enum", "default", "examples", "required", _OPTIONS})
_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_COMBINE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_GAP = 1e-9  # distance kept from an excluded whole number
_MOST_WHOLE = 1e6  # larger floats cannot represent the gap


class SchemaRuleError(ValueError):
    """A part of a schema that cannot be enforced. The message names its place."""


def prepared_schema(schema: Any) -> bool:
    """Changes a schema in place into one that the library enforces. Returns whether it changed.

    Raises SchemaRuleError.
    """
    parts = list(_parts(schema, "#"))
    can_merge = any(_COMBINE & part.keys() for _, part in parts)
    can_merge = can_merge and any(_is_fraction(part.get(b)) for _, part in parts for b in _BOUNDS)
    changes = [_prepare(part, place, can_merge) for place, part in parts]
    return any(changes)


def prepared_source(source: str) -> str:
    """Prepares a schema given as text. The text is unchanged if the schema is."""
    schema = json.loads(source)
    return json.dumps(schema, ensure_ascii=False) if prepared_schema(schema) else source


def prepared_lark(grammar: str) -> str:
    """Prepares every schema after a `%json` in a Lark grammar."""
    pieces, start = [], 0
    for found in _EMBEDDED.finditer(grammar):
        if found.start() < start:
            continue  # within the schema before
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except ValueError:
            continue  # the library says what is wrong
        options = schema.pop(_OPTIONS, None)
        own = options if isinstance(options, dict) else {}
        layout: dict[str, Any] = {name: own[name] for name in _LAYOUT_OPTIONS if name in own}
        if '"oneOf"' in grammar[found.end() : end]:
            layout["coerce_one_of"] = True
        if prepared_schema(schema) or layout != own:
            pieces += [grammar[start : found.end()], json.dumps({**schema, _OPTIONS: layout})]
            start = end
    return "".join(pieces) + grammar[start:]


def _parts(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every object that is a schema, or may be referenced as one, with its JSON pointer."""
    if isinstance(schema, list):
        for i, part in enumerate(schema):
            yield from _parts(part, f"{place}/{i}")
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in list(schema.items()):
        if key in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                yield from _parts(part, f"{place}/{key}/{name}")
        elif key not in _VALUES:
            yield from _parts(value, f"{place}/{key}")


def _prepare(part: dict[str, Any], place: str, can_merge: bool) -> bool:
    is_changed = part.pop(_OPTIONS, None) is not None
    if isinstance(kind := part.get("format"), str) and kind not in KNOWN_FORMATS:
        del part["format"]
        is_changed = True
    if "uniqueItems" in part and (part["uniqueItems"] is False or part.get("maxItems") in (0, 1)):
        del part["uniqueItems"]
        is_changed = True
    if part.get("uniqueItems") is True:
        raise SchemaRuleError(
            f"uniqueItems at {_shown(place)} cannot be enforced, because a grammar does "
            "not remember the items: leave it out"
        )
    for name in _BOUNDS:
        _check_exact(part.get(name), f"{place}/{name}")
    for own, kept, other, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        if _is_leaky(part, own, other, sign, can_merge):
            _narrow(part, own, kept, sign, place)
            is_changed = True
    return is_changed


def _is_leaky(
    part: dict[str, Any], own: str, others: tuple[str, str], sign: int, can_merge: bool
) -> bool:
    """Returns whether the library would allow an excluded whole number. It does if the other bound
    is less than 1 away, as in (0, 0.5]. Bounds of merged parts may meet like that."""
    bound = part.get(own)
    if not _is_number(bound) or bound != int(bound) or part.get("type") == "integer":
        return False
    ends = [part[name] for name in others if _is_number(part.get(name))]
    if any(0 < sign * (end - bound) < 1 for end in ends):
        return True
    return can_merge


def _narrow(part: dict[str, Any], own: str, kept: str, sign: int, place: str) -> None:
    """Replaces an exclusive bound by an inclusive one. Example: exclusiveMinimum 0 becomes minimum
    1e-09."""
    bound = part.pop(own)
    if abs(bound) > _MOST_WHOLE:
        raise SchemaRuleError(
            f"{own} at {_shown(place)} must be from {-_MOST_WHOLE:.0f} to "
            f"{_MOST_WHOLE:.0f}, because the other bound is less than 1 away; got {bound}"
        )
    near = round(bound + sign * _GAP, 9)
    ends = [near, part[kept]] if _is_number(part.get(kept)) else [near]
    part[kept] = max(ends) if sign > 0 else min(ends)


def _check_exact(bound: Any, place: str) -> None:
    """Checks that a bound is exact for the library, which computes with floats and then with 64
    bits; the largest 64-bit integer is exact too."""
    if not _is_number(bound):
        return
    is_kept = math.isfinite(bound) and (bound == 2**63 - 1 or int(float(bound)) == int(bound))
    if not is_kept:
        raise SchemaRuleError(
            f"the bound at {_shown(place)} has more digits than a 64-bit float can store, "
            f"got {str(bound)[:30]}; use one from -2^53 to 2^53"
        )


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_fraction(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and not value.is_integer()


def _shown(place: str) -> str:
    return place if len(place) <= 100 else f"{place[:100]}..."
