"""The engine behind the event loop: streams, limits, aborts, draining, death."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moe_serve.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.engine.build import build_engine
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.client import stream
from moe_serve.engine.request.delta_queue import DeltaQueue
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.errors import InvalidRequestError, ServerOverloadedError
from moe_serve.model.step_plan import StepPlan
from tests.support.engine.fake_runner import FakeRunner, continuation


def request(name: str, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 8) -> GenerationRequest:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, params=params)


class Runner(FakeRunner):
    """Makes as many steps as the test allows, or any number if the test sets none."""

    steps: threading.Semaphore | None = None

    def run(self, plan: StepPlan) -> Any:
        if self.steps is not None:
            assert self.steps.acquire(timeout=60)
        return super().run(plan)


class Fixture:
    """An AsyncEngine over the fake model."""

    def __init__(self, tiny: str) -> None:
        self.runner = Runner()
        scheduler = SchedulerConfig(max_num_seqs=4, max_queued_requests=6)
        built = build_engine(EngineConfig(model=ModelConfig(path=tiny), scheduler=scheduler))
        engine = Engine(
            LocalExecutor(self.runner, Sampler(frozenset())),
            scheduler=scheduler,
            num_pages=200,
            micro_batches=1,
            max_model_len=400,
            eos_token_ids=frozenset(),
        )
        self.engine = AsyncEngine(type(built)(engine, built.layout, built.spec), scheduler)


@pytest.fixture()
def fixture(tiny: str) -> Iterator[Fixture]:
    made = Fixture(tiny)
    yield made
    made.engine.close()


async def collect(engine: AsyncEngine, one: GenerationRequest) -> list[int]:
    return [token async for delta in stream(engine, one) for token in delta.token_ids]


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(6000):
        load = engine.stats().load
        if not (load.num_running or load.num_waiting) and load.num_free_pages == load.num_pages:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not idle: {engine.stats()}")


def test_streams_at_once(fixture: Fixture) -> None:
    async def main() -> None:
        answers = await asyncio.gather(
            *(collect(fixture.engine, request(f"r{i}", (i + 1, 3))) for i in range(6))
        )
        assert answers == [continuation([i + 1, 3], 8) for i in range(6)]
        await until_idle(fixture.engine)
        assert fixture.engine.num_open_requests == 0

    asyncio.run(main())


async def read(queue: DeltaQueue) -> list[TokenDelta]:
    await queue.wait()
    return queue.take()


def test_requests_of_a_group_share_a_queue_that_is_told_of_whole_steps(fixture: Fixture) -> None:
    steps = fixture.runner.steps = threading.Semaphore(0)
    names = ["a", "b", "c"]

    async def main() -> None:
        queue = fixture.engine.submit([request(name, max_tokens=8) for name in names])
        told: list[list[str]] = []

        def look() -> bool:
            told.append([delta.request_id for delta in queue.take()])
            return True

        queue.listen(look)
        reading = asyncio.create_task(read(queue))
        await asyncio.sleep(0)
        steps.release(7)
        while len(told) < 7:
            await asyncio.sleep(0.001)
        assert [sorted(step) for step in told] == [names] * 7
        steps.release()
        ends = await reading
        assert [delta.finish_reason for delta in ends] == [FinishReason.LENGTH] * 3

    asyncio.run(main())


def test_leaving_a_stream_aborts_the_request(fixture: Fixture) -> None:
    fixture.runner.steps = threading.Semaphore(1)

    async def main() -> None:
        deltas = stream(fixture.engine, request("a", max_tokens=390))
        await anext(deltas)
        await deltas.aclose()
        steps = fixture.engine.stats().num_steps
        fixture.runner.steps.release(1000)
        await until_idle(fixture.engine)
        assert fixture.engine.stats().num_steps < steps + 100
        assert fixture.engine.num_open_requests == 0

    asyncio.run(main())


def test_a_full_queue_refuses_all_of_a_group_or_none(fixture: Fixture) -> None:
    fixture.runner.steps = threading.Semaphore(0)

    async def main() -> None:
        with pytest.raises(InvalidRequestError, match=r"11 sequences can never be accepted"):
            fixture.engine.submit([request(f"r{i}") for i in range(11)])
        fixture.engine.submit([request(f"s{i}", max_tokens=390) for i in range(10)])
        refused = 0
        for i in range(20):  # four run, six wait: five more do not fit
            try:
                fixture.engine.submit([request(f"t{i}-{k}") for k in range(5)])
            except ServerOverloadedError as error:
                assert "max_queued_requests is 6" in str(error)
                assert error.retry_after_s > 0 and not error.is_draining
                refused += 1
        assert refused == 20
        assert fixture.engine.num_open_requests == 10
        fixture.runner.steps.release(10_000)
        for i in range(10):
            fixture.engine.abort(f"s{i}")
        await until_idle(fixture.engine)
        assert await collect(fixture.engine, request("a")) == continuation([1, 2], 8)

    asyncio.run(main())


def test_draining_refuses_new_requests_and_finishes_the_old(fixture: Fixture) -> None:
    async def main() -> None:
        running = asyncio.create_task(collect(fixture.engine, request("a", max_tokens=100)))
        await asyncio.sleep(0.01)
        fixture.engine.begin_drain()
        with pytest.raises(ServerOverloadedError) as caught:
            fixture.engine.submit([request("b")])
        assert caught.value.is_draining
        assert len(await running) == 100

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.faults
def test_a_dead_engine_ends_every_stream_and_says_why(fixture: Fixture) -> None:
    fixture.runner.steps = threading.Semaphore(1)

    async def main() -> None:
        queue = fixture.engine.submit([request("a", max_tokens=390)])
        await read(queue)
        fixture.runner.clear_pages = None  # type: ignore[assignment, method-assign]
        fixture.runner.fails_next = True  # and failing that request fails too
        fixture.runner.steps.release(1000)
        while (delta := (await read(queue))[-1]).finish_reason is None:
            pass
        assert delta.finish_reason is FinishReason.ERROR
        assert "TypeError" in (delta.error or "")
        assert not fixture.engine.stats().is_alive
        with pytest.raises(ServerOverloadedError, match="has stopped"):
            fixture.engine.submit([request("b")])

    asyncio.run(main())
