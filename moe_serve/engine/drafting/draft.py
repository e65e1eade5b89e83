"""Defines a draft and the interface of the drafters that propose it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from moe_serve.engine.request.sequence import Sequence

_WARM = 0.85  # temperature


class DraftSource(str, Enum):
    """The kind of drafter that proposed a draft; a label of the metrics."""

    NGRAM = "ngram"
    SUFFIX = "suffix"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"
    HEAD = "head"
    MTP = "mtp"
    SELF = "self"


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens that a drafter expects next. It is made for one step and never kept.

    `evidence` is the number of tokens that agreed before the drafted ones; the acceptance of drafts
    is counted apart by source and evidence. `confidences`: the probability that a network gives to
    each token, in per cent; empty: the drafter has none.
    """

    token_ids: tuple[int, ...]
    source: DraftSource
    evidence: int
    confidences: tuple[int, ...] = ()

    def cut(self, most: int) -> Draft:
        """Returns the draft with at most `most` tokens."""
        if len(self.token_ids) <= most:
            return self
        return Draft(self.token_ids[:most], self.source, self.evidence, self.confidences[:most])


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """A draft for the next step of a sequence, made by the process that samples tokens."""

    source: str  # a `DraftSource`
    token_ids: tuple[int, ...]
    confidences: tuple[int, ...] = ()  # see `Draft`

    def draft(self, temperature: float) -> Draft:
        """Returns the draft for a request with this temperature. Its evidence is the number of
        tokens that a grammar forces. That of a guess differs for greedy requests and for low and
        high temperatures, because these accept guesses at different rates.
        """
        source, evidence = DraftSource(self.source), len(self.token_ids)
        if source is not DraftSource.GRAMMAR:
            evidence = 0 if temperature == 0.0 else 2 if temperature < _WARM else 4
        return Draft(self.token_ids, source, evidence, self.confidences)


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of a step by sequence id, and the time in which a network made them."""

    of: Mapping[int, DraftProposal] = field(default_factory=dict)
    guess_s: float = 0.0


NO_PROPOSALS = Proposals()


class Drafter(Protocol):
    """Proposes tokens. It never changes a sequence, and its drafts never change an answer.

    A drafter that `searches` is asked only while that may pay. One that only follows a given text
    is asked in each step.
    """

    searches: bool

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """Returns at most `most` tokens expected after the sequence's last one; None without an
        expectation."""
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        ...
