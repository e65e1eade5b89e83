"""Decides whether a run of pages is loaded from a tier or computed again.

    t_load    = first byte + (queued bytes + bytes) / measured read rate
    t_compute = tokens * measured seconds of a prompt's token

The run is loaded if t_load, with a margin, is below t_compute. Both rates are averages of what this
server measured: the read rate of its loads, and the time of steps that mostly read prompts. Before
the first measurement a run is loaded. While loading does not pay, a small load measures the rate
again from time to time, and no request waits for it.

A load may be slower than expected. After a fourteenth of the time that computing would take, the
pages read so far tell how long the rest will take, and a request that would compute faster does so.
It keeps the pages that were read, so a wrong choice costs little. Before anything was read, a
request waits at most as long as it would compute. The store counts as hanging only after a longer
deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_BYTE_S = 0.002
_MARGIN = 1.1
_WEIGHT = 0.3  # of a new measurement of computing
_READ_WEIGHT, _READ_BYTES = 0.5, 2**20  # of a load of so many bytes; one of less has less
_LEAST_PROMPT_SHARE = 0.8  # of a step's tokens, for the step to count as reading
_LEAST_TOKENS = 32
_DEADLINE_FACTOR, _LEAST_DEADLINE_S, _MOST_DEADLINE_S = 4.0, 0.25, 5.0
_FIRST_DEADLINE_S = 1.0  # at least, before it is known what computing takes
_LEAST_PATIENCE_S = 0.02  # time for which threads may have to wait for their turns
_SEEN_SHARE, _UNSEEN_SHARE = 0.07, 0.25  # of computing, until a load is judged; if nothing is read
_FIRST_RATE = 100e6  # bytes/s, for the deadline of the first load


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice between loading and computing, how long a request waits for a load, after which
    time the store counts as hanging, and how long computing takes.
    """

    is_load: bool
    patience_s: float
    deadline_s: float
    compute_s: float | None = None  # None: not known

    def is_too_slow(self, share: float, seconds: float) -> bool:
        """Returns whether a load of which a share was read in some seconds would take longer than
        computing."""
        if self.compute_s is None:
            return False
        seen = _SEEN_SHARE if share else _UNSEEN_SHARE
        if seconds < max(seen * self.compute_s, _LEAST_PATIENCE_S):
            return False
        return seconds > share * _MARGIN * self.compute_s


class LoadOrCompute:
    """Keeps the two rates of one server, in seconds per token and bytes per second."""

    def __init__(self) -> None:
        self.compute_s: float | None = None  # of one token
        self.read_rate: float | None = None

    def note_step(self, num_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Notes a step. Steps that mostly generate say nothing about prompts."""
        if num_tokens >= _LEAST_TOKENS and num_prompt_tokens >= _LEAST_PROMPT_SHARE * num_tokens:
            self.compute_s = _average(self.compute_s, seconds / num_tokens, _WEIGHT)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """Notes a load that has ended. Seconds per byte are averaged, so that one load tells that a
        disk has become slow."""
        if num_bytes:
            weight = _READ_WEIGHT * min(1.0, num_bytes / _READ_BYTES)
            old = None if self.read_rate is None else 1 / self.read_rate
            self.read_rate = 1 / _average(old, max(seconds, 1e-9) / num_bytes, weight)

    def replace_read_rate(self, num_bytes: int, seconds: float) -> None:
        """Notes a load that replaces all earlier measurements: a probe, or a load that was given
        up.
        """
        if num_bytes:
            self.read_rate = num_bytes / max(seconds, 1e-9)

    def decide(self, num_tokens: int, num_bytes: int, num_queued_bytes: int) -> Decision:
        """Decides about a run of `num_tokens` tokens whose pages have `num_bytes` bytes."""
        rate = self.read_rate or _FIRST_RATE
        load_s = _FIRST_BYTE_S + (num_queued_bytes + num_bytes) / rate
        slow_s = max(_DEADLINE_FACTOR * load_s, _LEAST_DEADLINE_S)
        if self.compute_s is None:
            deadline = min(max(slow_s, _FIRST_DEADLINE_S), _MOST_DEADLINE_S)
            return Decision(True, deadline, deadline, None)
        compute_s = num_tokens * self.compute_s
        patience = min(max(compute_s, _LEAST_PATIENCE_S), _MOST_DEADLINE_S)
        deadline = min(max(slow_s, patience), _MOST_DEADLINE_S)
        is_load = self.read_rate is None or load_s * _MARGIN < compute_s
        return Decision(is_load, patience, deadline, compute_s)


def _average(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)
