"""The engine's counters for the metrics: scripted runs on the fake model with known numbers."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

import pytest

from moe_serve.cache.page_times import SampledPages
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.policy.arrival_order import FIFO, ArrivalOrder
from moe_serve.engine.schedule.policy.longest_first import split
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from tests.support.engine.fake_runner import FakeRunner, continuation


@dataclass(frozen=True, slots=True)
class LastFirst(ArrivalOrder):
    """Starts the last arrival first; a sequence that lacks pages does not hold up others."""

    def candidates(
        self, waiting: Iterable[Sequence], running: Items[Sequence]
    ) -> Iterable[Sequence]:
        return list(waiting)[::-1]

    def is_next(self, sequence: Sequence) -> bool:
        return False


LAST_FIRST = LastFirst("fifo", split)


def make_engine(
    runner: FakeRunner | None = None,
    *,
    seats: int = 8,
    num_pages: int = 64,
    budget: int = 256,
    has_prefix_cache: bool = True,
    rate: float = 0.0,
    policy: BatchPolicy = FIFO,
) -> Engine:
    return Engine(
        LocalExecutor(runner or FakeRunner(), Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget),
        num_pages=num_pages,
        micro_batches=1,
        max_model_len=160,
        eos_token_ids=frozenset(),
        has_prefix_cache=has_prefix_cache,
        sampled_pages=SampledPages(rate),
        policy=policy,
    )


def request(name: str, prompt: list[int], **params: object) -> GenerationRequest:
    fields = {"temperature": 0.0, "max_tokens": 4} | params
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**fields),  # type: ignore[arg-type]
    )


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[TokenDelta]]:
    result: dict[str, list[TokenDelta]] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for delta in engine.step():
            result.setdefault(delta.request_id, []).append(delta)
        engine.check_integrity()
    return result


def waiting(engine: Engine) -> tuple[int, int]:
    """Returns (number of waiting sequences, those of them that were left aside)."""
    engine.check_integrity()
    stats = engine.stats()
    return stats.load.num_waiting, stats.load.num_left_aside


def sources(engine: Engine) -> tuple[int, int]:
    """Returns (prompt tokens that were computed, prompt tokens from the cache)."""
    stats = engine.stats()
    return stats.counts.num_missed_tokens, stats.counts.num_hit_tokens


def test_prompt_tokens_by_source() -> None:
    engine, prompt = make_engine(), [*range(1, 41)]
    assert sources(engine) == (0, 0)
    run(engine, request("a", prompt))
    assert sources(engine) == (40, 0)
    run(engine, request("b", [*prompt, 7, 8]))
    assert sources(engine) == (42, 40), "all of it, and two tokens more"
    run(engine, request("c", prompt, prompt_logprobs=0))
    assert sources(engine) == (82, 40), "it takes nothing"


def test_prompt_tokens_without_the_cache_are_computed() -> None:
    engine = make_engine(has_prefix_cache=False)
    run(engine, request("a", [1] * 40))
    run(engine, request("b", [1] * 40))
    assert sources(engine) == (80, 0)


def test_a_preempted_prompt_counts_once_and_its_sequence_says_how_often() -> None:
    engine = make_engine(num_pages=10)
    prompts = {name: [ord(name) % 48] * 30 for name in "abcd"}
    result = run(engine, *(request(n, p, max_tokens=60) for n, p in prompts.items()))
    num_preemptions = engine.stats().counts.num_preemptions
    assert num_preemptions > 0
    assert sum(deltas[-1].num_preemptions for deltas in result.values()) == num_preemptions
    assert result["a"][-1].num_preemptions == 0, "the first goes on"
    assert sources(engine) == (120, 0)
    assert engine.stats().counts.num_prompt_tokens > 120, "prompts were computed again"


def test_who_moves_before_it_started_counts_where_it_starts() -> None:
    """A lost rank had two sequences, and one of them has started there."""
    lost, other, prompt = make_engine(seats=1), make_engine(), [*range(1, 41)]
    run(other, request("before", prompt))
    for name in ("a", "b"):
        lost.add(request(name, prompt))
    lost.step()
    assert sources(lost) == (40, 0)
    for sequence in lost.surrender():
        other.adopt(sequence)
    result = run(other)
    assert sources(other) == (40 + 1, 39), "b only: all but its last token"
    assert result["b"][-1].num_cached_tokens == 39
    assert {deltas[-1].num_preemptions for deltas in result.values()} == {0}


def test_who_fails_says_how_often_it_was_preempted() -> None:
    engine = make_engine(runner := FakeRunner(), num_pages=10)
    for name in "ab":
        engine.add(request(name, [ord(name) % 48] * 70, max_tokens=80))
    while engine.stats().counts.num_preemptions == 0:
        engine.step()
    runner.nan_after_token = ord("b") % 48
    engine.abort("a")
    deltas = run(engine)["b"]
    assert deltas[-1].error is not None and deltas[-1].num_preemptions == 1


@pytest.mark.faults
def test_corrupted_requests_are_those_with_nan() -> None:
    engine = make_engine(runner := FakeRunner())
    runner.nan_after_token = 49
    run(engine, request("bad", [1, 49]), request("good", [3, 4]))
    assert engine.stats().counts.num_corrupted == 1
    runner.fails_on_token = 48
    run(engine, request("failed", [1, 48]))
    assert engine.stats().counts.num_corrupted == 1, "another fault"


def test_who_waits_for_a_seat_waits_for_capacity() -> None:
    engine = make_engine(seats=1)
    for name in "abc":
        engine.add(request(name, [ord(name) % 48] * 5))
    assert waiting(engine) == (3, 0)
    engine.step()
    assert waiting(engine) == (2, 0)


def test_who_waits_for_pages_waits_for_capacity() -> None:
    for policy in (FIFO, LAST_FIRST):
        engine = make_engine(num_pages=10, policy=policy)
        engine.add(request("a", [1] * 90))
        engine.step()
        engine.add(request("b", [2] * 90))
        engine.step()
        assert waiting(engine) == (1, 0), policy
        engine.add(request("c", [3] * 5))
        engine.step()
        running = 2 if policy is LAST_FIRST else 1
        assert (engine.num_running, *waiting(engine)) == (running, 3 - running, 0), policy


def test_who_waits_for_a_prefix_is_left_aside() -> None:
    engine, long = make_engine(budget=40), [*range(1, 101)]
    for one in (request("a", long), request("b", long), request("c", [5, 6])):
        engine.add(one)
    engine.step()
    assert waiting(engine) == (2, 0), "a takes the whole budget: nobody was looked at"
    engine.step()
    engine.step()
    assert waiting(engine) == (1, 1), "b waits for a's pages, c started"
    engine.step()
    assert waiting(engine) == (0, 0)


def test_a_prefix_is_waited_for_with_nobody_behind() -> None:
    engine, long = make_engine(budget=64), [*range(1, 101)]
    engine.add(request("a", long))
    engine.add(request("b", long))
    engine.step()
    engine.step()
    assert waiting(engine) == (1, 1)
    engine.abort("b")
    assert waiting(engine) == (0, 0)


def test_whom_a_later_one_went_before_is_left_aside() -> None:
    engine = make_engine(seats=2, policy=LAST_FIRST)
    for name in "abcd":
        engine.add(request(name, [ord(name) % 48] * 5, max_tokens=2 + ord(name) % 2))
    engine.step()
    assert waiting(engine) == (2, 2), "d and c run"
    engine.step()
    assert waiting(engine) == (2, 2), "no seat: nobody was looked at again"
    engine.add(request("e", [9] * 5))
    assert waiting(engine) == (3, 2)
    engine.step()
    assert [s.request.request_id for s in engine._scheduler.waiting] == ["a", "b"]
    run(engine)
    assert waiting(engine) == (0, 0)


def test_sampled_pages_are_those_that_were_evicted() -> None:
    prompts = [[1 + i] * (30 + i) for i in range(12)] * 2
    answers = {}
    for rate in (0.0, 0.3, 1.0):
        engine = make_engine(num_pages=12, rate=rate)
        answers[rate] = [
            [t for d in run(engine, request(f"r{i}", p))[f"r{i}"] for t in d.token_ids]
            for i, p in enumerate(prompts)
        ]
        times, stats = engine.stats().counts.page_times, engine.stats()
        assert stats.counts.num_evicted_pages > 20
        counts = [sum(h.counts) for h in (times.lifetime, times.idle)]
        if rate in (0.0, 1.0):
            assert counts == [rate * stats.counts.num_evicted_pages] * 2
        assert times.lifetime.total >= times.idle.total
    assert answers[0.0] == answers[0.3] == answers[1.0] == [continuation(p, 4) for p in prompts]
