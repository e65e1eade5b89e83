"""The measurements of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


def _no_floats() -> array[float]:
    return array("d")


def _no_counts() -> array[int]:
    return array("L")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The times of one request, in seconds since the run began; the client fills it when the answer
    ended or failed.

    `scheduled_s` is when the request was due: in an open loop the workload's time, in a closed loop
    the moment at which the client was free, which is `started_s`. Every latency has two forms: from
    `scheduled_s`, as a user sees it, and from `started_s`, as the server does.
    """

    index: int
    scheduled_s: float
    started_s: float  # the client began: connecting, if it must, is part of the latency
    end_s: float  # the end of the answer, or when it failed
    first_s: float | None = None  # first and last event with tokens; None without streaming
    last_s: float | None = None
    gaps_s: array[float] = field(default_factory=_no_floats)  # between events with tokens
    gap_tokens: array[int] = field(default_factory=_no_counts)  # of each gap; empty: not known
    first_tokens: int = 1  # tokens of the first event, as far as the server says
    wanted_tokens: int = 0
    prompt_tokens: int | None = None  # these three from the server's usage
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None  # the kind: a short name, the same for the same cause
    detail: str = ""  # message of the server or the system

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def lateness_s(self) -> float:
        """The delay between due and sent, which the client caused."""
        return self.started_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def num_events(self) -> int:
        """The number of events that carried tokens."""
        return 0 if self.first_s is None else 1 + len(self.gaps_s)

    @property
    def counted_tokens(self) -> int:
        """The number of tokens from usage, or without it the number of events, each of one token or
        more."""
        return self.num_events if self.output_tokens is None else self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """The time per token after the first event; None if there are no such tokens."""
        if self.first_s is None or self.last_s is None or not self.gaps_s:
            return None
        num_later = self.counted_tokens - self.first_tokens
        return (self.last_s - self.first_s) / num_later if num_later > 0 else None
