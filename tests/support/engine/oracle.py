"""A drafter that knows the answers, and spoils a share of its tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.engine import Engine
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.step_drafts import StepDrafts


class Oracle:
    """Implements Drafter. Each drafted token is right with probability `alpha`; a wrong one may be
    any token, also one that the model does not have."""

    def __init__(
        self,
        answers: Mapping[str, list[int]],
        alpha: float = 1.0,
        *,
        vocab_size: int = 50,
        seed: int = 0,
        lengths: tuple[int, int] | None = None,
    ) -> None:
        """`answers` by request id. Drafts have a random number of tokens in `lengths`, or as many
        as they may."""
        self._answers, self._alpha = answers, alpha
        self._vocab_size, self._lengths = vocab_size, lengths
        self._rng = random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        """See Drafter.propose."""
        if self._lengths is not None:
            most = min(most, self._rng.randint(*self._lengths))
        start = sequence.num_output_tokens
        answer = self._answers.get(sequence.request.request_id, [])[start : start + most]
        answer += [0] * (most - len(answer))
        drafted = [self._spoilt(token) for token in answer]
        return Draft(tuple(drafted), DraftSource.HEAD, start) if drafted else None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See Drafter.forget."""

    def _spoilt(self, token: int) -> int:
        if self._rng.random() < self._alpha:
            return token
        return self._rng.randrange(self._vocab_size + 2)


def give_drafts(
    engine: object,
    oracle: Oracle,
    *,
    most: int = 5,
    vocab_size: int = 50,
    is_adaptive: bool = False,
) -> Drafting:
    """Make an engine verify the oracle's drafts."""
    assert isinstance(engine, Engine), f"{engine}"
    drafting = Drafting(
        [oracle], engine._stop, vocab_size=vocab_size, max_tokens=most, is_adaptive=is_adaptive
    )
    engine._drafts = StepDrafts(engine._scheduler, drafting, engine._scheduler._clock)
    return drafting
