"""Urgent requests in an engine: who starts, who gives up its pages, and the same tokens."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.policy.arrival_order import FIFO
from moe_serve.engine.schedule.policy.policy import BatchPolicy
from tests.support.engine.batch_world import World, of_domain
from tests.support.engine.fake_runner import VOCAB_SIZE, FakeRunner, continuation
from tests.support.sampled_cases import EVERY_CASE

AN_HOUR = 3600.0  # nobody waits that long here


def make_engine(
    runner: FakeRunner,
    *,
    max_num_seqs: int = 1,
    num_pages: int = 64,
    budget: int = 64,
    max_wait_s: float = AN_HOUR,
    policy: BatchPolicy = FIFO,
) -> Engine:
    return Engine(
        LocalExecutor(runner, Sampler(frozenset())),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_batched_tokens=budget, max_passed_over_s=max_wait_s
        ),
        num_pages=num_pages,
        micro_batches=1,
        max_model_len=160,
        eos_token_ids=frozenset(),
        policy=policy,
    )


def request(
    name: str, priority: int = 0, num_prompt: int = 4, max_tokens: int = 3
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(1 + sum(map(ord, name)) % 40,) * num_prompt,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        priority=priority,
        arrival_time=time.monotonic(),
    )


def running(engine: Engine) -> list[str]:
    return [s.request.request_id for s in engine._scheduler.running]


def starts(engine: Engine) -> list[str]:
    """Steps until the engine is idle and returns the names in the order in which they first ran."""
    names: list[str] = []
    while engine.has_work:
        for delta in engine.step():
            if delta.request_id not in names:
                names.append(delta.request_id)
        engine.check_integrity()
    return names


def test_one_seat_goes_to_the_most_urgent_and_ties_to_who_came_first() -> None:
    engine = make_engine(FakeRunner())
    engine.add(request("first", 5))
    engine.step()
    for name, priority in {"a": 1, "b": 0, "c": -1, "d": 0, "e": 2, "f": -1}.items():
        engine.add(request(name, priority))
    assert starts(engine) == ["first", "c", "f", "b", "d", "a", "e"]


def test_who_runs_is_not_put_back_for_somebody_more_urgent() -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=2)
    for name in "ab":
        engine.add(request(name, 9, max_tokens=20))
    engine.step()
    engine.add(request("urgent", -9))
    for _ in range(10):
        engine.step()
        assert running(engine) == ["a", "b"]
    assert starts(engine)[-1] == "urgent"
    assert engine.stats().counts.num_preemptions == 0


@pytest.mark.parametrize(
    ("priorities", "left"),
    [
        ((0, 0, 0), ["a", "b"]),
        ((0, 5, 0), ["a", "c"]),
        ((5, 0, 0), ["b", "c"]),
        ((5, 5, 0), ["a", "c"]),
        ((-1, -2, -3), ["b", "c"]),
    ],
)
def test_the_least_urgent_gives_its_pages_back(
    priorities: tuple[int, ...], left: list[str]
) -> None:
    """Each of three takes 3 of 12 pages, then a fourth, and there is no fifth for all. Of several
    least urgent requests, the one that started last gives up its pages."""
    engine = make_engine(FakeRunner(), max_num_seqs=3, num_pages=12, budget=200)
    wanted = [
        request(name, priority, num_prompt=40, max_tokens=60)
        for name, priority in zip("abc", priorities, strict=True)
    ]
    found: dict[str, list[int]] = {}

    def step() -> None:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()

    for one in wanted:
        engine.add(one)
        step()
    assert running(engine) == ["a", "b", "c"], "started in this order"
    while not engine.stats().counts.num_preemptions:
        step()
    assert running(engine) == left
    while engine.has_work:
        step()
    for one in wanted:
        assert found[one.request_id] == continuation(list(one.prompt_token_ids), 60)


def test_who_was_put_back_waits_behind_the_more_urgent() -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=3, num_pages=12, budget=200)
    for name, priority in {"a": 0, "b": 5, "c": 0}.items():
        engine.add(request(name, priority, num_prompt=40, max_tokens=60))
        engine.step()
    while not engine.stats().counts.num_preemptions:
        engine.step()
    engine.add(request("same", 5))
    engine.add(request("urgent", 1))
    order = []
    while engine.has_work:
        before = set(running(engine))
        engine.step()
        order += [name for name in running(engine) if name not in before]
    assert [name for name in order if name not in "ac"] == ["urgent", "b", "same"]


def test_an_urgent_one_that_lacks_pages_keeps_the_others_back() -> None:
    """There are pages for the small request, but it would take them from the urgent one again and
    again."""
    engine = make_engine(FakeRunner(), max_num_seqs=4, num_pages=12, budget=200)
    engine.add(request("runs", 0, num_prompt=60, max_tokens=20))
    engine.step()
    engine.add(request("small", 1))
    engine.add(request("large", 0, num_prompt=150, max_tokens=2))
    engine.step()
    assert running(engine) == ["runs"]
    assert starts(engine) == ["runs", "large", "small"]


def test_who_waited_for_long_is_passed_by_nobody() -> None:
    engine = make_engine(FakeRunner(), max_wait_s=60.0)
    long_ago = time.monotonic() - 60.0 * 20.5  # worth 20
    engine.add(replace(request("old", 8), arrival_time=long_ago))
    engine.add(request("now", 3))
    engine.add(replace(request("older", 9), arrival_time=long_ago))
    engine.add(request("urgent", -9))
    assert starts(engine) == ["old", "older", "urgent", "now"]


def test_an_endless_flow_of_urgent_requests_starves_nobody() -> None:
    """With a bound of 0 s, or nearly 0 s, requests start in the order of arrival."""
    for bound, is_served in ((AN_HOUR, False), (1e-9, True), (0.0, True)):
        engine = make_engine(FakeRunner(), max_wait_s=bound)
        engine.add(request("patient", 1, max_tokens=1))
        told: set[str] = set()
        for number in range(20):
            engine.add(request(f"urgent{number}", 0, max_tokens=1))
            told |= {delta.request_id for delta in engine.step()}
        assert ("patient" in told) == is_served


def test_the_expert_aware_policy_chooses_among_the_most_urgent_only() -> None:
    """Within one priority, no request is passed over more often than allowed."""
    world = World(max_passed_over=1)
    engine = make_engine(FakeRunner(), max_num_seqs=2, policy=world.policy)
    domains = {"runs": 1, "a": 0, "b": 1, "c": 1, "d": 1, "e": 0, "f": 1}
    for key, domain in enumerate(domains.values()):
        world.table.put([key], of_domain(domain)[None])
    engine.add(request("runs", 0, max_tokens=100))
    engine.step()
    for name, priority in {"a": 1, "b": 1, "c": 1, "d": 1, "e": -1, "f": -1}.items():
        engine.add(request(name, priority, max_tokens=1))
    assert starts(engine) == ["runs", "f", "e", "b", "a", "c", "d"]
    assert engine.stats().batching is not None
    assert engine.stats().batching.num_passed_over == 2, "e by f, a by b: not by the more urgent"


@pytest.mark.parametrize("seed", range(12 if EVERY_CASE else 6))
def test_random_priorities_in_any_batch(seed: int) -> None:
    """The tokens never change; no request starts while a more urgent one waits, and none gives up
    its pages while a less urgent one runs."""
    rng = random.Random(seed)
    engine = make_engine(
        FakeRunner(),
        max_num_seqs=rng.randint(1, 6),
        num_pages=rng.randint(10, 24),
        budget=rng.randint(4, 80),
    )
    wanted: dict[str, GenerationRequest] = {}
    found: dict[str, list[int]] = {}
    aborted: set[str] = set()
    scheduler, known = engine._scheduler, engine._sequences
    for turn in range(300):
        if turn < 200 and rng.random() < 0.3:
            tokens = tuple(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 90)))
            name, params = f"r{len(wanted)}", SamplingParams(temperature=0.0, max_tokens=30)
            one = replace(request(name, rng.randint(-2, 2)), prompt_token_ids=tokens, params=params)
            wanted[name] = one
            engine.add(one)
        if wanted and rng.random() < 0.05:
            name = rng.choice(list(wanted))
            aborted.add(name)
            engine.abort(name)
        before = {s.id for s in known.values() if s.is_running}
        for delta in engine.step() if engine.has_work else []:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
        waiting = [s.request.priority for s in scheduler.waiting]
        started = [s.request.priority for s in scheduler.running if s.id not in before]
        back = [s.request.priority for s in scheduler.waiting if s.id in before]
        still = [s.request.priority for s in scheduler.running if s.id in before]
        assert max(started, default=-9) <= min(waiting, default=9)
        assert min(back, default=9) >= max(still, default=-9)
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    for name, one in wanted.items():
        answer = found.get(name, [])
        assert answer == continuation(list(one.prompt_token_ids), len(answer)), name
        assert len(answer) == 30 or name in aborted, name


@pytest.mark.parametrize("seed", range(4))
def test_with_all_priorities_equal_every_step_is_the_same(seed: int) -> None:
    """This holds for every value of the priority and every waiting time."""
    plans = []
    for priority, bound in ((0, AN_HOUR), (0, 0.0), (7, AN_HOUR), (-(2**31), 5.0)):
        rng, runner = random.Random(seed), FakeRunner()
        engine = make_engine(
            runner, max_num_seqs=4, num_pages=14, budget=rng.randint(20, 90), max_wait_s=bound
        )
        for number in range(20):
            size = rng.randint(1, 60)
            engine.add(request(f"r{number}", priority, num_prompt=size, max_tokens=24))
            for _ in range(rng.randint(0, 4)):
                engine.step()
        starts(engine)
        assert engine.stats().counts.num_preemptions > 0
        plans.append(
            [
                [(p.sequence_id, p.start, p.token_ids.tolist()) for p in plan.slices]
                for plan in runner.plans
            ]
        )
    assert all(plan == plans[0] for plan in plans)
