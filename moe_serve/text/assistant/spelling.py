"""Writes a marker, and any text up to one, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spelling:
    """Writes a marker as text, or as a special token if it is one."""

    special_ids: Mapping[str, int]

    def __call__(self, text: str) -> str:
        special = self.special_ids.get(text)
        return quoted(text) if special is None else f"<[{special}]>"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def text_up_to(name: str, end: str, spell: Spelling) -> list[str]:
    """Return rules for any text and the marker that ends it.

    If the marker is a special token, ordinary tokens must not spell it: parsers read text and would
    take it for the end.
    """
    if end not in spell.special_ids:
        return [f"{name}[suffix={quoted(end)}]: /(?s:.*)/"]
    spelt = re.escape(end).replace("/", r"\/")
    text = f"{name}_text".upper()
    return [f"{name}: {text} {spell(end)}", f"{text}: /(?s:.*)/ & ~/(?s:.*{spelt}.*)/"]
