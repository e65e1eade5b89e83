"""The data of a finished sequence, for metrics and spans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta

_PREDICTION = "prediction"  # the source of drafts from a client's prediction


@dataclass(slots=True, kw_only=True)
class DraftTally:
    """Counts the results of a sequence's drafts. An accepted token is a token of the answer, so a
    token behind a stop string is not accepted.
    """

    num_drafts: int = 0  # steps that verified a draft
    num_drafted: int = 0  # tokens
    num_accepted: int = 0
    num_predicted: int = 0  # drafted tokens of the client's prediction
    num_predicted_accepted: int = 0
    steps_by_accepted: list[int] = field(default_factory=list)  # [a]: steps that accepted a tokens

    def read(self, deltas: Iterable[TokenDelta], num_kept: int) -> None:
        """Adds deltas that came together. `num_kept` of their tokens are in the answer."""
        for delta in deltas:
            kept = min(len(delta.token_ids), num_kept)
            num_kept -= kept
            drafted = delta.drafted
            if drafted is None:
                continue
            accepted = min(drafted.num_accepted, kept)
            self.num_drafts += 1
            self.num_drafted += drafted.num_drafted
            self.num_accepted += accepted
            missing = 1 + accepted - len(self.steps_by_accepted)
            self.steps_by_accepted += [0] * missing
            self.steps_by_accepted[accepted] += 1
            if drafted.source == _PREDICTION:
                self.num_predicted += drafted.num_drafted
                self.num_predicted_accepted += accepted


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """A sequence that has ended. Times are of the engine's clock, in order; None: not reached.

        arrival   started   first_token   ended
           | queue  | prefill    | decode   |
                    |      inference        |

    They are taken where the text is made, so they include the hand-over between threads.
    """

    request: GenerationRequest
    reason: FinishReason
    num_tokens: int
    num_cached_tokens: int
    started: float | None
    first_token: float | None
    ended: float
    num_preemptions: int = 0
    drafts: DraftTally | None = None  # None: the server does not draft

    @property
    def arrival(self) -> float:
        return self.request.arrival_time

    @property
    def queue_s(self) -> float | None:
        return _between(self.arrival, self.started)

    @property
    def prefill_s(self) -> float | None:
        return _between(self.started, self.first_token)

    @property
    def decode_s(self) -> float | None:
        return _between(self.first_token, self.ended)

    @property
    def inference_s(self) -> float | None:
        return _between(self.started, self.ended)

    @property
    def num_computed_tokens(self) -> int | None:
        """Prompt tokens that were not in the prefix cache; None: the prompt was not read to its
        end."""
        if self.first_token is None:
            return None
        return len(self.request.prompt_token_ids) - self.num_cached_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one."""
        if self.first_token is None or self.num_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.num_tokens - 1)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
