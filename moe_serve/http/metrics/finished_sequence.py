"""What is known of a sequence once it has ended: for metrics and for traces."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.engine.request.request import FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """Times are of the engine's clock, in order, and are taken where text is made, so they hold the
    hand-over between the threads too. None: it did not come so far.

        arrival   started   first_token   ended
           | queue  | prefill    | decode   |
                    |      inference        |
    """

    request: GenerationRequest
    reason: FinishReason
    num_tokens: int
    num_cached_tokens: int
    started: float | None
    first_token: float | None
    ended: float
    num_preemptions: int = 0

    @property
    def arrival(self) -> float:
        return self.request.arrival_time

    @property
    def num_computed_tokens(self) -> int | None:
        """Tokens of the prompt that were not found in the prefix cache; None: it was not read to
        its end."""
        if self.first_token is None:
            return None
        return len(self.request.prompt_token_ids) - self.num_cached_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds of a token after the first one."""
        if self.first_token is None or self.num_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.num_tokens - 1)
