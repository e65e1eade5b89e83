"""Compares the model's bits per byte with those of a byte trigram, by domain, and checks the
target."""

from __future__ import annotations

from dataclasses import dataclass

# Trigrams of an independent implementation, each trained on its domain's own train split.
REFERENCE_TRIGRAM = {
    "stories": 2.84,
    "encyclopedia": 3.01,
    "instruct": 2.60,
    "math": 2.84,
    "code_python": 2.83,
    "code_c": 2.79,
    "french": 2.66,
    "german_law": 2.29,
}
MIN_GAIN = 0.25


@dataclass(frozen=True, slots=True)
class DomainScore:
    """The bits per byte on the whole valid split of one domain."""

    domain: str
    model: float
    trigram: float  # measured here
    num_bytes: int
    num_tokens: int

    @property
    def gain(self) -> float:
        """Return how far the model is below the better of the two trigrams, as a fraction."""
        return 1 - self.model / min(self.trigram, REFERENCE_TRIGRAM[self.domain])

    @property
    def is_good(self) -> bool:
        return self.gain >= MIN_GAIN
