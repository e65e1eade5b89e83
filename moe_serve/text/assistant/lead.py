"""Builds grammars of the reasoning before an answer that follows a grammar.

Each is a grammar in llguidance's Lark, in which @answer stands for the answer.
"""

from __future__ import annotations

from moe_serve.text.assistant import harmony
from moe_serve.text.assistant.spelling import Spelling, text_up_to

_LAYOUT = r'"\n"{0,2}'  # the parser drops it


def thinking_lead(
    opening: str, closing: str, spell: Spelling, *, is_open: bool, has_layout: bool
) -> str:
    """Build the grammar of reasoning between two markers.

    `is_open`: it has begun and must be closed; otherwise it may begin. `has_layout`: line breaks
    that are not part of the answer may follow it.
    """
    thought = f"thought {_LAYOUT}" if has_layout else "thought"
    if not is_open:
        reason = f"({_LAYOUT} {spell(opening)} {thought})?"
    elif opening in spell.special_ids:
        reason = f"{spell(opening)}? {thought}"  # ordinary text cannot spell the marker
    else:
        reason = thought
    return _lines(
        "start: reason @answer", f"reason: {reason}", *text_up_to("thought", closing, spell)
    )


def harmony_lead(spell: Spelling, *, has_analysis: bool, is_final: bool) -> str:
    """Build the grammar for harmony.

    `is_final`: the answer is a message of the channel `final`; otherwise it contains its own heads.
    """
    analysis = " ".join(map(spell, (harmony.CHANNEL, "analysis", harmony.MESSAGE)))
    final = " ".join(map(spell, (harmony.CHANNEL, "final", harmony.MESSAGE)))
    parts = ["analysis?"] if has_analysis else []
    parts += [final] if is_final else []
    rules = [f"start: {' '.join([*parts, '@answer'])}"]
    if has_analysis:
        rules.append(f'analysis: {analysis} thought {spell(harmony.START)} "assistant"')
        rules += text_up_to("thought", harmony.END, spell)
    return _lines(*rules)


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
