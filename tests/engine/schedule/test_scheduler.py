"""The scheduler: budgets, chunks, joining, preemption, and time by the clock that it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engine.fake_engine import make_engine, request, run, tokens
from tests.support.engine.fake_runner import FakeRunner, continuation


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_fewer_tokens_in_a_step_than_seats_hold_nobody_up(budget: int) -> None:
    """Who would find no room in the next steps is not started: all who run go on in each."""
    engine = make_engine(FakeRunner(), max_num_seqs=8, budget=budget)
    prompts = {f"r{i}": [1 + i] * (1 + 5 * i % 13) for i in range(8)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=5 + len(prompt)))
    steps: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        number += 1
        for delta in engine.step():
            steps.setdefault(delta.request_id, []).extend([number] * len(delta.token_ids))
        assert engine.stats().load.num_running <= budget
    assert steps.keys() == prompts.keys()
    for name, prompt in prompts.items():
        first = steps[name][0]
        assert steps[name] == list(range(first, first + 5 + len(prompt))), name


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_prompts_are_read_in_chunks_within_the_budget(budget: int) -> None:
    runner = FakeRunner()
    engine = make_engine(runner, budget=budget)
    prompts = {name: [ord(name), *range(1, 40)] for name in "abc"}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    result = run(engine)
    for name, prompt in prompts.items():
        assert tokens(result[name]) == continuation(prompt, 10), name
    assert max(sum(b.num_tokens for b in plan.micro_batches) for plan in runner.plans) <= budget


def test_new_requests_join_at_any_step() -> None:
    engine = make_engine(FakeRunner())
    engine.add(request("a", [1], max_tokens=20))
    engine.step()
    engine.add(request("b", [2], max_tokens=3))
    deltas = engine.step()
    assert {d.request_id for d in deltas} == {"a", "b"}
    run(engine)


def test_decode_goes_before_prompts() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, budget=8)
    engine.add(request("a", [1]))
    engine.step()
    engine.add(request("b", list(range(1, 100))))
    engine.step()
    first, second = runner.plans[-1].slices
    assert {len(first.token_ids), len(second.token_ids)} == {1, 7}
    run(engine)


def test_when_pages_run_out_the_last_to_arrive_is_computed_again() -> None:
    engine = make_engine(FakeRunner(), num_pages=10)
    prompts = {name: [ord(name)] * 30 for name in "abcd"}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=60))
    result = run(engine)
    assert engine.stats().counts.num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens(result[name]) == continuation(prompt, 60), name


def test_a_sequence_starts_at_the_time_of_the_given_clock() -> None:
    now = [100.0]
    engine = make_engine(FakeRunner(), max_num_seqs=1, clock=lambda: now[0])
    for name in "ab":
        engine.add(request(name, [ord(name)], max_tokens=3))
    starts: dict[str, float | None] = {}
    while engine.has_work:
        for delta in engine.step():
            starts[delta.request_id] = delta.started_at
        now[0] += 1000.0
    assert starts == {"a": 100.0, "b": 3100.0}, "b had to wait for the seat"


def test_waiting_counts_by_the_given_clock() -> None:
    """A request of priority 3 waits while urgent ones come. Each 5 s on the clock make it more
    urgent by 1, so it starts after 15 s, in no real time."""
    now = [0.0]
    engine = make_engine(FakeRunner(), max_num_seqs=1, max_wait_s=5.0, clock=lambda: now[0])
    engine.add(replace(request("patient", [1], max_tokens=1), priority=3))
    started: list[str] = []
    while "patient" not in started:
        urgent = request(f"urgent {now[0]:g}", [2], max_tokens=1)
        engine.add(replace(urgent, arrival_time=now[0]))
        started += [delta.request_id for delta in engine.step()]
        now[0] += 1.0
    assert started == [*(f"urgent {second}" for second in range(15)), "patient"]


@pytest.mark.parametrize("speed", [0.0, 1e-6, 3600.0])
def test_the_clock_never_changes_tokens(speed: float) -> None:
    now = [0.0]
    engine = make_engine(FakeRunner(), max_num_seqs=3, num_pages=12, clock=lambda: now[0])
    prompts = {name: [ord(name)] * (20 + 3 * index) for index, name in enumerate("abcdef")}
    for index, (name, prompt) in enumerate(prompts.items()):
        made = request(name, prompt, max_tokens=40)
        engine.add(replace(made, priority=index % 3, arrival_time=now[0]))
        now[0] += speed
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
        now[0] += speed
    assert found == {name: continuation(prompt, 40) for name, prompt in prompts.items()}
