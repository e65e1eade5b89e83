"""How llguidance's Lark says a marker, and any text up to one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spelling:
    """A marker as text, or as the special token that it is."""

    special_ids: Mapping[str, int]

    def __call__(self, text: str) -> str:
        special = self.special_ids.get(text)
        return quoted(text) if special is None else f"<[{special}]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_up_to(name: str, end: str, spell: Spelling) -> list[str]:
    """A rule for any text and the marker that ends it. Where that is a special token, ordinary
    ones must not spell it: parsers read text, and would take it for the end."""
    if end not in spell.special_ids:
        return [f"{name}[suffix={quoted(end)}]: /(?s:.*)/"]
    spelt = re.escape(end).replace("/", r"\/")
    text = f"{name}_text".upper()
    return [f"{name}: {text} {spell(end)}", f"{text}: /(?s:.*)/ & ~/(?s:.*{spelt}.*)/"]
