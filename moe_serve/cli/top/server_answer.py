"""Reads a JSON answer of a server that may be older or newer than this command: missing fields are
None, never an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), " ")


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON value; `at` follows names: answer.at("requests").number("running")."""

    content: Any

    def at(self, *names: str) -> Answer:
        content = self.content
        for name in names:
            content = content.get(name) if isinstance(content, Mapping) else None
        return Answer(content)

    @property
    def is_there(self) -> bool:
        return self.content is not None

    @property
    def items(self) -> list[Answer]:
        return [Answer(item) for item in self.content] if isinstance(self.content, list) else []

    def number(self, *names: str) -> float | None:
        content = self.at(*names).content
        is_number = isinstance(content, int | float) and not isinstance(content, bool)
        return float(content) if is_number else None

    def text(self, *names: str) -> str | None:
        """Returns the text without characters that could steer the terminal."""
        content = self.at(*names).content
        return content.translate(_CONTROLS) if isinstance(content, str) else None

    def numbers(self, *names: str) -> list[float]:
        """Returns the numbers of a list and skips other items."""
        found = [item.number() for item in self.at(*names).items]
        return [number for number in found if number is not None]
