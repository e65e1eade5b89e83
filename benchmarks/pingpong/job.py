"""Messages to and from a rank of the benchmark, one JSON object per line."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """The first line: the rank of the pair to run. With `core` None the process may use any
    core.
    """

    role: str  # "attention" or "expert"
    model: str  # checkpoint folder
    core: int | None
    context: int  # tokens of each sequence after the step
    max_rows: int  # sequences at once
    host: str  # where this rank listens
    network: str | None  # the network namespace that it enters
    store_host: str
    store_port: int  # 0: this rank serves the store, and prints its port first
    secret: str = field(repr=False)  # of the store


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Every further line: steps to run in a new data group.

    The transport delays the messages by `delay_s`. A step is given by the rows of its
    micro-batches.
    """

    epoch: int
    delay_s: float
    steps: list[list[int]]
    is_parted: bool = False  # run layers in parts, though there are single calls for them
    is_counted: bool = False  # count the calls from Python, which takes time
    is_timed: bool = True  # note the times of messages, so no native call may exchange several


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMarks:
    """One step as a rank measured it, in ns of the host's monotonic clock.

    For each exchange, in order, it has the end of waiting for a message and the end of sending one.
    """

    start: int
    end: int  # of the layers
    whole_end: int  # logits are there
    received: list[int]
    sent: list[int]
    cpu: int = 0  # of the rank's thread, in the layers
    num_calls: int = 0  # of functions, from Python, if they are counted
