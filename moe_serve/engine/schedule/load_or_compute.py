"""Decides whether a run of pages is loaded from a tier or computed again.

    t_load    = first byte + (queued bytes + bytes) / measured read rate
    t_compute = tokens * measured seconds of a prompt's token

The run is loaded if t_load, with a margin, is below t_compute. Both rates are averages of what this
server measured: the read rate of its loads, and the time of steps that mostly read prompts. Before
the first measurement a run is loaded. While loading does not pay, a small load now and then
measures the rate again, for which nothing waits.

A load may be slower than expected. A request waits for it as long as it would compute, so the wait
at most doubles its time. The store has longer: only after the deadline it counts as one that hangs.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_BYTE_S = 0.002
_MARGIN = 1.1
_WEIGHT = 0.3  # of a new measurement
_LEAST_PROMPT_SHARE = 0.8  # of a step's tokens, for the step to count as reading
_LEAST_TOKENS = 32
_DEADLINE_FACTOR, _LEAST_DEADLINE_S, _MOST_DEADLINE_S = 4.0, 0.25, 5.0
_FIRST_DEADLINE_S = 1.0  # at least, before it is known what computing takes
_LEAST_PATIENCE_S = 0.02  # threads may wait so long for their turns
_FIRST_RATE = 100e6  # bytes/s, for the deadline of the first load


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice between loading and computing, how long a request waits for a load, and how long
    one may take before the store counts as one that hangs."""

    is_load: bool
    patience_s: float
    deadline_s: float


class LoadOrCompute:
    """Keeps the two rates of one server, in seconds per token and bytes per second."""

    def __init__(self) -> None:
        self.compute_s: float | None = None  # of one token
        self.read_rate: float | None = None

    def note_step(self, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Notes a step. Steps that mostly generate say nothing about prompts."""
        if num_tokens >= _LEAST_TOKENS and num_prompt_tokens >= _LEAST_PROMPT_SHARE * num_tokens:
            self.compute_s = _average(self.compute_s, seconds / num_tokens)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Notes a load that has ended."""
        if num_bytes:
            self.read_rate = _average(self.read_rate, num_bytes / max(seconds, 1e-9))

    def decide(self, num_tokens: int, num_bytes: int, num_queued_bytes: int) -> Decision:
        """Decides about a run of `num_tokens` tokens whose pages have `num_bytes` bytes."""
        rate = self.read_rate or _FIRST_RATE
        load_s = _FIRST_BYTE_S + (num_queued_bytes + num_bytes) / rate
        slow_s = max(_DEADLINE_FACTOR * load_s, _LEAST_DEADLINE_S)
        if self.compute_s is None:
            deadline = min(max(slow_s, _FIRST_DEADLINE_S), _MOST_DEADLINE_S)
            return Decision(True, deadline, deadline)
        compute_s = num_tokens * self.compute_s
        patience = min(max(compute_s, _LEAST_PATIENCE_S), _MOST_DEADLINE_S)
        deadline = min(max(slow_s, patience), _MOST_DEADLINE_S)
        is_load = self.read_rate is None or load_s * _MARGIN < compute_s
        return Decision(is_load, patience, deadline)


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
