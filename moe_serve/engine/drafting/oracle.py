"""A drafter that knows the answers, for tests and benchmarks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Tokens

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.request.sequence import Sequence


class Oracle:
    """Implements Drafter. Each drafted token is right with probability `alpha`. A wrong token may
    be any token, even one that the model does not have.
    """

    searches = True

    def __init__(
        self,
        answers: Mapping[str, Tokens[int]],
        alpha: float = 1.0,
        *,
        vocab_size: int,
        seed: int = 0,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        """`answers` maps request ids to answers. Drafts have a random number of tokens in
        `lengths`; without `lengths` they are as long as allowed.
        """
        self._answers, self._alpha = answers, alpha
        self._vocab_size, self._lengths = vocab_size, lengths
        self._rng = random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        if self._lengths is not None:
            most = min(most, self._rng.randint(*self._lengths))
        start = sequence.num_output_tokens
        known = self._answers.get(sequence.request.request_id, ())
        answer = [*known[start : start + most]]
        answer += [0] * (most - len(answer))
        drafted = [self._spoilt(token) for token in answer]
        return Draft(tuple(drafted), DraftSource.HEAD, start) if drafted else None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""

    def _spoilt(self, token: int) -> int:
        if self._rng.random() < self._alpha:
            return token
        return self._rng.randrange(self._vocab_size + 2)
