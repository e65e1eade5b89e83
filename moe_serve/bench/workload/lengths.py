"""Numbers of tokens, drawn evenly from a range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_serve.errors import BenchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A range from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """Parses "64" or "32:512"."""
        low, colon, high = text.partition(":")
        if not (low.isdecimal() and (high.isdecimal() if colon else True)):
            raise BenchError(f"{flag} cannot be {text!r}: it takes N or LOW:HIGH in tokens.")
        lengths = cls(low=int(low), high=int(high) if colon else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise BenchError(f"{flag} cannot be {text!r}: it takes 1 <= LOW <= HIGH.")
        return lengths

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))
