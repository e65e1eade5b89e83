"""Defines the constraint of an answer: a grammar that every sampled token must follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moe_serve.errors import InvalidGrammarError

MAX_SOURCE_CHARS = 65_536
ANSWER = "@answer"  # stands for the constrained part in a lead

ConstraintKind = Literal[
    "json_object", "json_schema", "regex", "choice", "lark", "gbnf", "structural_tag"
]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A kind of grammar and its source text.

    `source` is the schema as JSON, the pattern, the choices as a JSON list of strings, the grammar
    (`lark` is llguidance's dialect, `gbnf` llama.cpp's), or tags in free text as the JSON that
    `structural_tag.py` reads. It is empty for `json_object`.

    `lead` is the text that may come first, such as reasoning: a Lark grammar in which `@answer`
    stands for the constrained rest. It is empty if the constraint holds from the start.
    """

    kind: ConstraintKind
    source: str = ""
    lead: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            kinds = ", ".join(get_args(ConstraintKind))
            raise InvalidGrammarError(
                f"The kind of a constraint must be one of {kinds}, got {self.kind!r:.100}."
            )
        for name, text in (("source", self.source), ("lead", self.lead)):
            if not isinstance(text, str):
                raise InvalidGrammarError(
                    f"The {name} of a constraint must be a string, got {text!r:.100}."
                )
            if len(text) > MAX_SOURCE_CHARS:
                raise InvalidGrammarError(
                    f"The {name} of a constraint must have at most {MAX_SOURCE_CHARS} characters, "
                    f"got {len(text)}."
                )
        if self.lead and ANSWER not in self.lead:
            raise InvalidGrammarError(f"The lead of a constraint must contain {ANSWER}.")
