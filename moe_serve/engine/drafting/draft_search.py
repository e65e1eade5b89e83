"""Asks the drafters for the best draft of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from moe_serve.engine.drafting.acceptance import Acceptance
from moe_serve.engine.drafting.draft import Draft, Drafter, DraftProposal
from moe_serve.engine.request.sequence import Sequence, StopRule

_ENOUGH = 0.6  # share of the longest draft


class DraftSearch:
    """Chooses among the drafts of several drafters the one with the most tokens to expect."""

    def __init__(
        self, drafters: Iterable[Drafter], acceptance: Acceptance, stop: StopRule, *,
        vocab_size: int, max_tokens: int,
    ) -> None:  # fmt: skip
        """`acceptance` tells how many tokens of a draft to expect."""
        self.drafters = tuple(drafters)
        self._acceptance, self._stop = acceptance, stop
        self._vocab_size, self._max_tokens = vocab_size, max_tokens

    def best(
        self, sequence: Sequence, proposal: DraftProposal | None, *, searches: bool
    ) -> Draft | None:
        """Returns the best draft of a sequence, or None. `proposal` is that of the process that
        samples. Unless it `searches`, only drafters that need no search are asked.
        """
        most = min(self._max_tokens, self._stop.num_left(sequence) - 1)
        if most < 1:
            return None
        best, most_expected = None, 0.0
        for draft in self._drafts(sequence, proposal, most, searches=searches):
            kept = draft.cut(self._num_useful(sequence, draft))
            if kept.token_ids:
                expected = self._acceptance.expected(sequence.id, kept)
                if best is None or expected > most_expected:
                    best, most_expected = kept, expected
                if expected > _ENOUGH * most:
                    break  # further drafters would cost time
        return best

    def forget(self, sequence_ids: Collection[int]) -> None:
        """Drops the state of sequences that have ended or moved away."""
        for drafter in self.drafters:
            drafter.forget(sequence_ids)

    def _drafts(
        self, sequence: Sequence, proposal: DraftProposal | None, most: int, *, searches: bool
    ) -> Iterable[Draft]:
        if proposal is not None:
            yield proposal.draft(sequence.request.params.temperature).cut(most)
        for drafter in self.drafters:
            if searches or not drafter.searches:
                draft = drafter.propose(sequence, most)
                if draft is not None:
                    yield draft

    def _num_useful(self, sequence: Sequence, draft: Draft) -> int:
        """Returns the number of tokens before the first one that ends the answer or has no
        embedding in the model. No row counts behind such a token.
        """
        tokens, ends, size = draft.token_ids, self._stop.ends(sequence), self._vocab_size
        if ends.isdisjoint(tokens) and max(tokens, default=0) < size:
            return len(tokens)
        return next(i for i, token in enumerate(tokens) if token in ends or token >= size)
