"""The requests of a simulation, and decode steps that can be run several at once.

A step repeats the one before if every request in progress got a token, none waits, and none ends or
needs a new page. Such steps differ in nothing but the lengths of their contexts: the engine would
schedule them alike. They may be run in one call, as a run of several tokens for every request, once
it is known that no request came before the last of them began.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.service_terms import NO_SERVICE, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """A request of a workload. Its prompt is made when it arrives, as many would not fit memory."""

    index: int
    at_s: float  # unused in a closed loop
    num_output: int
    make_prompt: Callable[[], Sequence[int]]
    service: Service = NO_SERVICE
    priority: int = 0
    session: str = ""


def request_of(job: SimulatedRequest, prompt: tuple[int, ...], at_s: float) -> GenerationRequest:
    """Returns the request of a job that arrives at `at_s`."""
    return GenerationRequest(
        request_id=str(job.index),
        prompt_token_ids=prompt,
        params=SamplingParams(
            max_tokens=job.num_output, temperature=0.0, ignore_eos=True, seed=job.index
        ),
        arrival_time=at_s,
        priority=job.priority,
        service=job.service,
    )


def _no_times() -> array[float]:
    return array("d")


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """The times of a job, in simulated seconds since the run began."""

    index: int
    cell: int
    due_s: float
    num_prompt: int
    num_output: int  # asked for
    num_cached: int = 0
    token_times: array[float] = field(default_factory=_no_times)  # one for each token
    error: str | None = None
    service: Service = NO_SERVICE
    session: str = ""
    predicted_ttft_s: float | None = None  # the forecast at its arrival; None: there was none
    is_refused: bool = False  # it never reached the queue

    @property
    def end_s(self) -> float:
        return self.token_times[-1] if self.token_times else self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAhead:
    """Steps that a cell will run if no request comes, with their first and last moments."""

    begins: tuple[float, ...]
    ends: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepsDone:
    """Steps that were run: when the first began, their ends, and the tokens of all of them."""

    begin_s: float
    ends: tuple[float, ...]
    deltas: list[TokenDelta]


def num_alike(running: Collection[RequestTimes], page_size: int) -> int:
    """Returns how many steps are alike: until a request ends or needs a page.

    A request of n tokens computes its last one in the next step, at place n - 1. It needs a new
    page if that place is the first of one.
    """
    least = 1 << 30
    for job in running:
        num_got = len(job.token_times)
        place = (job.num_prompt + num_got - 1) % page_size
        least = min(least, job.num_output - num_got, page_size - place if place else 0)
        if least < 2:
            return 0
    return least if running else 0
