"""Serves requests with the real engine and model in this process, as the simulator serves them."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from moe_serve.bench.figures.request_record import RequestRecord
from moe_serve.bench.simulated_requests import jobs_of, record_of
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.clock import Clock
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.planning.measured_model import MeasuredModel
from moe_serve.planning.natural_steps import measured_engine
from moe_serve.planning.whole_steps import NotingExecutor, StepSample, one_call_pipeline
from moe_serve.simulate.steps_ahead import RequestTimes, SimulatedRequest

_VOCABULARY = 256  # ids that every model has


class SkippingClock:
    """A clock that jumps over waiting: seconds of `source`, and those that were skipped."""

    def __init__(self, source: Clock) -> None:
        self._source, self._since = source, source()

    def __call__(self) -> float:
        return self._source() - self._since

    def skip_to(self, seconds: float) -> None:
        self._since -= max(0.0, seconds - self())


def run_for_real(
    model: MeasuredModel,
    slots: Sequence[Slot],
    concurrency: int | None,
    scheduler: SchedulerConfig,
    source: Clock = time.perf_counter,
) -> tuple[list[RequestRecord], list[StepSample]]:
    """Serves all requests; see `World.run`. Returns the steps, too."""
    executor = NotingExecutor(one_call_pipeline(model), _sampler(model))
    steps: list[StepSample] = []

    def note(seconds: float) -> None:
        steps.append(StepSample(executor.load, seconds))

    engine = measured_engine(executor, model, scheduler)
    return serve(engine, slots, concurrency, source, note), steps


def engine_in_process(model: MeasuredModel, scheduler: SchedulerConfig) -> Engine:
    """Builds the engine of one process."""
    executor = LocalExecutor(one_call_pipeline(model), _sampler(model))
    return measured_engine(executor, model, scheduler)


def _sampler(model: MeasuredModel) -> Sampler:
    return Sampler(frozenset(model.spec.eos_token_ids))


def serve(
    engine: DrivenEngine,
    slots: Sequence[Slot],
    concurrency: int | None,
    source: Clock = time.perf_counter,
    on_step: Callable[[float], None] = lambda seconds: None,
) -> list[RequestRecord]:
    """Serves all requests on an engine that has none, and waits for their ends. `on_step` gets the
    seconds of every step."""
    jobs = deque(jobs_of(slots, 0))
    clock, running = SkippingClock(source), dict[str, RequestTimes]()
    done: list[RequestRecord] = []
    while jobs or running:
        if concurrency is not None:
            while jobs and len(running) < concurrency:
                _send(engine, jobs.popleft(), clock(), running)
        else:
            if not running:
                clock.skip_to(jobs[0].at_s)
            while jobs and jobs[0].at_s <= clock():
                _send(engine, jobs[0], jobs.popleft().at_s, running)
        begin = clock()
        deltas = engine.step()
        now = clock()
        on_step(now - begin)
        for delta in deltas:
            times = running[delta.request_id]
            times.token_times.extend((now,) * len(delta.token_ids))
            if delta.finish_reason is not None:
                done.append(record_of(running.pop(delta.request_id)))
    return sorted(done, key=lambda record: record.index)


def _send(
    engine: DrivenEngine, job: SimulatedRequest, due_s: float, running: dict[str, RequestTimes]
) -> None:
    prompt = tuple(token % _VOCABULARY for token in job.make_prompt())
    params = SamplingParams(
        max_tokens=job.num_output, temperature=1.0, seed=job.index, ignore_eos=True
    )
    request_id = str(job.index)
    running[request_id] = RequestTimes(
        index=job.index,
        cell=0,
        due_s=due_s,
        num_prompt=len(prompt),
        num_output=job.num_output,
        token_times=array("d"),
    )
    engine.add(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
