"""Writes tags in free text as a grammar in llguidance's Lark.

The text up to a trigger is a lazy lexeme: it ends at the trigger's first occurrence, and only the
continuations of a tag can follow. Strings of a request enter the grammar quoted or inside JSON,
never verbatim.

The name of a special token stands for that token or, as text, for itself; both read the same. Free
text contains no special tokens.
"""

from __future__ import annotations

import json
import re

from moe_serve.engine.request.structural_tag import StructuralTag, StructuralTagError, Trigger
from moe_serve.engine.sampling.grammar.schema_rules import prepared_source
from moe_serve.engine.sampling.grammar.vocabulary import Vocabulary
from moe_serve.text.assistant.format_grammars import quoted


def tag_grammar(structure: StructuralTag, vocabulary: Vocabulary, whitespace: str) -> str:
    """Builds the grammar. `whitespace` is the pattern allowed between the parts of JSON. Raises
    StructuralTagError for a trigger that the vocabulary's special tokens split."""
    spell = _Spelling(vocabulary)
    banned = " | ".join(_text(t.text) for t in structure.triggers if not structure.tags_of(t))
    clean = f" & ~(ANY ({banned}) ANY)" if banned else ""
    names = " | ".join(f"tag_{i}" for i in range(len(structure.tags)))
    lines = ["start: tag* TEXT", f"tag: {names}", f"TEXT: ANY{clean}", "ANY: /(?s:.*)/"]
    for k, trigger in enumerate(structure.triggers):
        places = structure.tags_of(trigger)
        if not places:
            continue
        lines += [f"head_{k}[lazy]: HEAD_{k}", f"HEAD_{k}: (ANY {_text(trigger.text)}){clean}"]
        for i in places:
            begin = structure.tags[i].begin
            ways = [f"head_{k} {spell(begin.removeprefix(trigger.text))}"]
            marker = _first_special(begin, trigger, spell)
            if marker:
                ways.append(f"TEXT <[{spell.ids[marker]}]> {spell(begin.removeprefix(marker))}")
            lines.append(f"open_{i}: {' | '.join(ways)}")
    lines += _tag_rules(structure, spell, whitespace)
    return "\n".join(lines) + "\n"


def _tag_rules(structure: StructuralTag, spell: _Spelling, whitespace: str) -> list[str]:
    """Returns the rules that follow the begins. Tags with the same schema share its rule."""
    lines, names = [], dict[str, str]()
    for i, tag in enumerate(structure.tags):
        own = json.loads(prepared_source(json.dumps(tag.schema)))
        guidance = {"whitespace_pattern": whitespace, "coerce_one_of": True}
        schema = json.dumps({**own, "x-guidance": guidance}, ensure_ascii=False)
        if schema not in names:
            names[schema] = f"json_{i}"
            lines.append(f"json_{i}: %json {schema}")
        lines.append(f"tag_{i}: open_{i} {names[schema]} {spell(tag.end)}")
    return lines


def _first_special(begin: str, trigger: Trigger, spell: _Spelling) -> str:
    """Returns the name of the special token that the tag begins with, or ""."""
    plain, *others = spell.pieces(begin)
    if others and 0 < len(plain) < len(trigger.text):
        raise StructuralTagError(
            f"{trigger.place} must begin with the special token {others[0]!r:.60}, or end "
            "before it, because free text contains no special tokens",
            place=trigger.place,
        )
    return others[0] if others and not plain else ""


class _Spelling:
    """Spells text with special tokens. `ids` maps their names to ids, without tokens that end an
    answer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids: dict[str, int] = {}
        for i in sorted(vocabulary.special_ids - set(vocabulary.eos_ids)):
            name = vocabulary.tokens[i].decode(errors="ignore")
            if name.encode() == vocabulary.tokens[i] and name:
                self.ids.setdefault(name, i)
        names = sorted(self.ids, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)()")

    def pieces(self, text: str) -> list[str]:
        """Splits text into text, name, text, name, …, text; the text pieces may be empty."""
        return self._names.split(text)

    def __call__(self, text: str) -> str:
        parts = []
        for i, piece in enumerate(self.pieces(text)):
            if i % 2:
                parts.append(f"({_text(piece)} | <[{self.ids[piece]}]>)")
            elif piece:
                parts.append(_text(piece))
        return " ".join(parts)


def _text(text: str) -> str:
    return quoted(text).replace("\x7f", r"\u007f")  # Lark's strings hold no DEL
