"""Estimates the probability that each token of a draft is accepted, from the results of earlier
drafts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from moe_serve.engine.drafting.confidence import ConfidenceRates
from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.request.draft_counts import MAX_DRAFT

_EVIDENCE = (0, 2, 4, 8, 16)  # upper ends of the buckets of `Draft.evidence`; one more for the rest
_PRIOR_TRIES = 4.0  # weight of the prior
_MAX_TRIES = 256.0  # counts are halved there, so that they follow a change
_REQUEST_PRIOR = 1.5  # accepted tokens by which a request is taken to be like all others
_REQUEST_DECAY = 0.9  # of a request's counts, for each further draft
_LEAST_SURVIVAL = 0.03  # a draft is cut where it is less probable to be accepted
_MOST_SURVIVAL = 0.999
_MOST_FACTOR = 1.2  # by which a request's drafts may be better than those of all
_CERTAIN, _MUCH = 0.95, 32  # prior of drafts from a text behind so many tokens that agreed
_FIRST_LENGTH = 2  # tokens of a request's first draft from a text
_TEXTS = (DraftSource.NGRAM, DraftSource.SUFFIX, DraftSource.PREDICTION)
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
    """Tries and acceptances by position in a draft; both fade.

    Until a position was tried a few times, its rate is assumed to be near that of the position
    before it, so that good drafts soon become long. `survivals[p]` is the product of the rates up
    to position p, and `totals[n]` the sum of the first n survivals: the tokens to expect of a draft
    of n tokens.
    """

    __slots__ = ("_num_new", "_prior", "accepted", "survivals", "totals", "tried")

    def __init__(self, prior: float) -> None:
        """`prior` is the acceptance of the first token before any was counted."""
        self._prior, self._num_new = prior, 0
        self.tried, self.accepted = [0.0] * MAX_DRAFT, [0.0] * MAX_DRAFT
        self._estimate()

    def note(self, num_drafted: int, num_accepted: int) -> None:
        tried, accepted = self.tried, self.accepted
        for position in range(num_accepted):
            tried[position] += 1.0
            accepted[position] += 1.0
        if num_accepted < num_drafted:
            tried[num_accepted] += 1.0
        self._num_new += 1
        if self._num_new > tried[0] / 16:
            self._estimate()

    def _estimate(self) -> None:
        """Updates the estimates. They may miss the newest sixteenth of the counts."""
        self._num_new = 0
        if max(self.tried) > _MAX_TRIES:
            for counts in (self.tried, self.accepted):
                counts[:] = [count / 2 for count in counts]
        rate, survival = self._prior, 1.0
        self.survivals: list[float] = []
        for accepted, tried in zip(self.accepted, self.tried, strict=True):
            rate = (accepted + _PRIOR_TRIES * rate) / (tried + _PRIOR_TRIES)
            survival *= rate
            self.survivals.append(min(survival, _MOST_SURVIVAL))
        self.totals: list[float] = [0.0, *accumulate(self.survivals)]


@dataclass(slots=True)
class _Luck:
    """The success of one request with the drafts of one source."""

    expected: float = _REQUEST_PRIOR  # accepted tokens if it were like all requests
    accepted: float = _REQUEST_PRIOR
    most: int = _FIRST_LENGTH  # tokens of its next draft, if it is from a text

    @property
    def factor(self) -> float:
        """The acceptance of this request, divided by that of all requests."""
        return min(self.accepted / self.expected, _MOST_FACTOR)


class Acceptance:
    """Counts accepted drafts by source, evidence and position, and by request and source.

    The estimate for a request is that of all requests times the request's own factor, so that a
    request that never repeats itself stops drafting after two or three drafts, although others
    gain. For evidence that was not seen yet, the estimate is halfway between a prior and all drafts
    of its source.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[DraftSource, int], _Counts] = {}
        self._rates: dict[tuple[DraftSource, int], ConfidenceRates] = {}
        self._lucks: dict[int, dict[DraftSource, _Luck]] = {}

    def expected(self, sequence_id: int, draft: Draft) -> float:
        """Returns the number of tokens of the draft that are accepted on average."""
        if draft.confidences:
            return sum(self.survivals(sequence_id, draft))
        totals = self._counts_of(draft).totals
        return self._factor(sequence_id, draft.source) * totals[len(draft.token_ids)]

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Returns for each token of the draft the probability that it and all before it are
        accepted. The improbable rest of a draft is left out."""
        factor = self._factor(sequence_id, draft.source)
        if draft.confidences:
            survivals = self._rates_of(draft).survivals(draft.confidences, factor)
            return [survival for survival in survivals if survival >= _LEAST_SURVIVAL]
        survivals = self._counts_of(draft).survivals[: len(draft.token_ids)]
        if factor != 1.0:
            survivals = [min(survival * factor, _MOST_SURVIVAL) for survival in survivals]
        if survivals and survivals[-1] < _LEAST_SURVIVAL:
            return [survival for survival in survivals if survival >= _LEAST_SURVIVAL]
        return survivals

    def most(self, sequence_id: int, draft: Draft) -> int:
        """Returns the number of tokens of the draft that may be verified. The first draft of a
        request from a text has two at most, and each that was right makes the next twice as long.
        So a text that has just ceased to repeat costs little.
        """
        if draft.source not in _TEXTS:
            return len(draft.token_ids)
        luck = self._lucks.get(sequence_id, {}).get(draft.source)
        return _FIRST_LENGTH if luck is None else luck.most

    def note(self, sequence_id: int, draft: Draft, num_accepted: int) -> None:
        """Counts a draft that was verified. `num_accepted` of its tokens were published."""
        lucks = self._lucks.setdefault(sequence_id, {})
        luck = lucks.get(draft.source)
        if luck is None:
            luck = lucks[draft.source] = _Luck()
        own, decay = (1 - _REQUEST_DECAY) * _REQUEST_PRIOR, _REQUEST_DECAY
        if num_accepted == len(draft.token_ids):
            luck.most = max(luck.most, 2 * num_accepted)
        luck.accepted = luck.accepted * decay + own + num_accepted
        luck.expected = luck.expected * decay + own
        if draft.confidences:
            rates = self._rates_of(draft)
            luck.expected += sum(rates.survivals(draft.confidences, 1.0))
            rates.note(draft.confidences, num_accepted)
            return
        counts, num_drafted = self._counts_of(draft), len(draft.token_ids)
        luck.expected += counts.totals[num_drafted]
        counts.note(num_drafted, num_accepted)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        for sequence_id in sequence_ids:
            self._lucks.pop(sequence_id, None)

    def _factor(self, sequence_id: int, source: DraftSource) -> float:
        lucks = self._lucks.get(sequence_id)
        luck = None if lucks is None else lucks.get(source)
        return 1.0 if luck is None else luck.factor

    def _rates_of(self, draft: Draft) -> ConfidenceRates:
        key = (draft.source, draft.evidence)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = ConfidenceRates()
        return rates

    def _counts_of(self, draft: Draft) -> _Counts:
        key = (draft.source, bisect_left(_EVIDENCE, draft.evidence))
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = self._new_counts(draft.source, draft.evidence)
        return counts

    def _new_counts(self, source: DraftSource, evidence: int) -> _Counts:
        prior = _PRIORS[source]
        if source in _TEXTS:
            prior += (_CERTAIN - prior) * min(evidence, _MUCH) / _MUCH
        known = [counts for key, counts in self._counts.items() if key[0] is source]
        tried = sum(sum(counts.tried) for counts in known)
        if not tried:
            return _Counts(prior)
        accepted = sum(sum(counts.accepted) for counts in known)
        return _Counts((prior + accepted / tried) / 2)
