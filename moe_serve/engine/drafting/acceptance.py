"""Estimates how probably each token of a draft is accepted, from what became of earlier drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.request.draft_counts import MAX_DRAFT

_EVIDENCE = (2, 4, 8, 16)  # upper ends of the buckets of `Draft.evidence`; one more for the rest
_PRIOR_TRIES = 4.0  # weight of the prior
_MAX_TRIES = 256.0  # counts are halved there, so that they follow a change
_REQUEST_PRIOR = 1.5  # accepted tokens by which a request is taken to be like all others
_REQUEST_DECAY = 0.9  # of a request's counts, for each further draft
_FIRST_RETRY, _LAST_RETRY = 16, 256  # steps without a draft before one is tried again
RETRY_TOKENS = 1
_HOPELESS = 0.1  # expected tokens below which a proposal was not worth its time
_MAX_PAUSE = 31  # steps
_LEAST_SURVIVAL = 0.03  # a draft is cut where it is less probable to be accepted
_LEAST_FACTOR = 0.2  # a request whose drafts did worse only retries
# acceptance of a token whose predecessors were accepted, before any was counted
_PRIORS = {
    DraftSource.NGRAM: 0.5,
    DraftSource.SUFFIX: 0.7,
    DraftSource.PREDICTION: 0.8,
    DraftSource.GRAMMAR: 0.9,
    DraftSource.HEAD: 0.6,
    DraftSource.MTP: 0.7,
    DraftSource.SELF: 0.8,
}


class _Counts:
    """Tries and acceptances by position in a draft; both fade."""

    __slots__ = ("accepted", "tried")

    def __init__(self, prior: float) -> None:
        self.tried = [_PRIOR_TRIES] * MAX_DRAFT
        self.accepted = [prior * _PRIOR_TRIES] * MAX_DRAFT

    def note(self, num_drafted: int, num_accepted: int) -> None:
        for position in range(min(num_accepted + 1, num_drafted)):
            self.tried[position] += 1.0
            self.accepted[position] += position < num_accepted
            if self.tried[position] > _MAX_TRIES:
                self.tried[position] /= 2
                self.accepted[position] /= 2


@dataclass(slots=True)
class _Request:
    """The luck of one request's drafts, and its steps since the last one."""

    expected: float = _REQUEST_PRIOR  # accepted tokens if it were like all requests
    accepted: float = _REQUEST_PRIOR
    num_silent: int = 0  # steps without a draft
    pause: int = 0  # steps for which no draft is proposed after a hopeless one
    num_paused: int = 0
    retry: int = _FIRST_RETRY

    @property
    def factor(self) -> float:
        """Its acceptance over that of all requests."""
        return min(self.accepted / self.expected, 1.2)


class Acceptance:
    """Counts accepted drafts by source, evidence and position, and by request.

    The estimate for a request is that of all requests times the request's own factor, so that a
    request that never repeats itself stops drafting after two or three drafts, although others
    gain. A silent request tries a short draft again after 8, 16, ... 256 steps.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[DraftSource, int], _Counts] = {}
        self._requests: dict[int, _Request] = {}

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Return for each token of the draft the probability that it and all before it are
        accepted. The improbable rest of a draft is left out."""
        counts = self._counts_of(draft)
        request = self._requests.get(sequence_id)
        factor = 1.0 if request is None else request.factor
        survivals, survival = list[float](), factor
        for position in range(min(len(draft.token_ids), MAX_DRAFT)):
            survival *= counts.accepted[position] / counts.tried[position]
            if survival < _LEAST_SURVIVAL:
                break
            survivals.append(min(survival, 0.999))
        return survivals

    def is_silent(self, sequence_id: int) -> bool:
        """Return whether the sequence's drafts have failed so often that none is to be proposed in
        this step. To be asked once in each step."""
        request = self._requests.get(sequence_id)
        if request is None:
            return False
        request.num_silent += 1
        if request.num_paused < request.pause:
            request.num_paused += 1
            return True
        return request.factor < _LEAST_FACTOR and request.num_silent < request.retry

    def note_proposed(self, sequence_id: int, survivals: Sequence[float]) -> None:
        """Count a proposal. After hopeless ones the sequence proposes ever more seldom."""
        request = self._requests.setdefault(sequence_id, _Request())
        is_hopeless = sum(survivals) < _HOPELESS
        request.pause = min(1 + 2 * request.pause, _MAX_PAUSE) if is_hopeless else 0
        request.num_paused = 0

    def chosen(self, sequence_ids: Iterable[int]) -> None:
        """Note that drafts of these sequences are verified because a gain is expected."""
        for sequence_id in sequence_ids:
            request = self._requests.setdefault(sequence_id, _Request())
            request.num_silent, request.retry = 0, _FIRST_RETRY

    def is_due(self, sequence_ids: Iterable[int]) -> bool:
        """Return whether one of the sequences would retry."""
        known = self._requests
        return any(
            known[key].num_silent >= known[key].retry for key in sequence_ids if key in known
        )

    def retries(self, sequence_ids: Iterable[int], most: int) -> dict[int, int]:
        """Return the number of tokens to draft without an expected gain, by sequence, to find out
        whether its luck or the cost of rows has changed. Usually empty."""
        found: dict[int, int] = {}
        for sequence_id in sequence_ids:
            request = self._requests.setdefault(sequence_id, _Request())
            if request.num_silent >= request.retry and len(found) < most:
                request.num_silent, request.retry = 0, min(2 * request.retry, _LAST_RETRY)
                found[sequence_id] = RETRY_TOKENS
        return found

    def note(self, sequence_id: int, draft: Draft, num_accepted: int) -> None:
        """Count a draft that was verified. `num_accepted` of its tokens were published."""
        request = self._requests.setdefault(sequence_id, _Request())
        expected = sum(self.survivals(sequence_id, draft)) / request.factor
        own = 1 - _REQUEST_DECAY
        request.expected = request.expected * _REQUEST_DECAY + own * _REQUEST_PRIOR + expected
        request.pause = 0 if num_accepted else request.pause
        request.accepted = request.accepted * _REQUEST_DECAY + own * _REQUEST_PRIOR + num_accepted
        self._counts_of(draft).note(len(draft.token_ids), num_accepted)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drop the state of sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._requests.pop(sequence_id, None)

    def _counts_of(self, draft: Draft) -> _Counts:
        bucket = next(
            (i for i, end in enumerate(_EVIDENCE) if draft.evidence <= end), len(_EVIDENCE)
        )
        key = (draft.source, bucket)
        if key not in self._counts:
            self._counts[key] = _Counts(_PRIORS[draft.source])
        return self._counts[key]
