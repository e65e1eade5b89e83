"""The clock of a simulated cell, and the tokens and seconds that stand in for a device's work."""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.engine.sampling.sampler import Sampled

ANSWER_TOKEN = 0
_RUN = (Sampled(token_id=ANSWER_TOKEN, is_valid=True, logprob=None),)


class VirtualClock:
    """Simulated seconds since the run began. Calling it returns them, so it is a `Clock`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, seconds: float) -> None:
        """Moves on. An earlier moment leaves the clock as it is."""
        self.now = max(self.now, seconds)


def answers(
    slices: Iterable[tuple[int, int]], num_tokens: int = 1
) -> dict[int, tuple[Sampled, ...]]:
    """Returns `num_tokens` tokens for each (sequence id, number of logits) that wants logits.

    Every token is the same, as greedy answers to equal prompts are. The length of an answer comes
    from the workload.
    """
    run = _RUN * num_tokens
    return {sequence_id: run for sequence_id, num_logits in slices if num_logits}
