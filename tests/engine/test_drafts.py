"""Steps that verify drafts, right or wrong, give the answers, ends and usage of steps without
drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason, TokenDelta
from moe_serve.engine.sampling.sampler import Sampled
from tests.engine.test_runs import (
    EOS,
    Answer,
    FailingSampler,
    PoisonedRunner,
    crowd,
    engine_of,
    make_engine,
    note,
    request,
    run,
)
from tests.support.engine.fake_runner import FakeRunner, continuation
from tests.support.engine.oracle import give_drafts
from tests.support.sampled_cases import EVERY_CASE


def answers_of(found: dict[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in found.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_random_requests(seed: int, alpha: float) -> None:
    """Pages are few, so sequences are preempted, and a context becomes full."""
    rng = random.Random(seed)
    requests, num_pages = crowd(rng), rng.choice([10, 16, 64])
    expected = run(make_engine(FakeRunner(), num_pages), requests)
    engine = make_engine(FakeRunner(), num_pages)
    oracle = Oracle(answers_of(expected), alpha, seed=seed, lengths=(1, 16), vocab_size=50)
    drafting = give_drafts(engine, oracle, most=rng.choice([1, 2, 5, 16]))
    assert run(engine, requests) == expected
    total = drafting.counts.total
    assert total.num_accepted <= total.num_drafted
    if alpha == 1.0 and total.num_drafted:
        assert total.num_accepted == total.num_drafted, "the oracle is always right"


@pytest.mark.parametrize("seed", range(10))
def test_the_controller_changes_no_answer(seed: int) -> None:
    rng = random.Random(100 + seed)
    requests = crowd(rng)
    expected = run(make_engine(FakeRunner()), requests)
    engine = make_engine(FakeRunner())
    oracle = Oracle(answers_of(expected), rng.random(), seed=seed, vocab_size=50)
    give_drafts(engine, oracle, most=16, is_adaptive=True)
    assert run(engine, requests) == expected


@pytest.mark.parametrize("length", range(1, 9))
def test_every_length_of_an_answer_is_exact(length: int) -> None:
    """A right draft never goes beyond the answer's maximum length."""
    runner = FakeRunner()
    engine = engine_of(LocalExecutor(runner, make_engine(FakeRunner())._executor._sampler))  # type: ignore[attr-defined]
    answer = continuation([1, 2, 3], 30)
    give_drafts(engine, Oracle({"a": answer}, vocab_size=50), most=5)
    found = run(engine, [request("a", [1, 2, 3], max_tokens=length, ignore_eos=True)])
    assert found["a"].token_ids == answer[:length] and found["a"].end is FinishReason.LENGTH
    assert len(runner.plans) == 1 + -(-(length - 1) // 6)


@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_within_a_draft(place: int) -> None:
    """An end token at any place of a run ends the answer there, with its reason."""
    answer = continuation([1, 2, 3], 30)
    stop = answer[place]
    first = answer.index(stop)
    engine = make_engine(FakeRunner())
    give_drafts(engine, Oracle({"a": answer}, vocab_size=50), most=5)
    asked = request("a", [1, 2, 3], max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    found = run(engine, [asked])["a"]
    assert found.token_ids == answer[: first + 1]
    assert (found.end, found.stop_token_id) == (FinishReason.STOP, stop)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(12))
def test_a_drafted_token_that_gives_nan_harms_no_request(seed: int) -> None:
    """The drafted token is wrong, so its request goes on as if the draft had never been there."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 48) for _ in range(rng.choice([9, 14, 15, 16]))]
    answer = continuation(prompt, 40)
    poison = next(token for token in range(1, 49) if token not in {*prompt, *answer})
    expected = run(
        make_engine(PoisonedRunner(poison)), [request("a", prompt, max_tokens=40, ignore_eos=True)]
    )
    drafted = [poison if rng.random() < 0.2 else token for token in answer]
    engine = make_engine(PoisonedRunner(poison))
    drafting = give_drafts(engine, Oracle({"a": drafted}, vocab_size=50), most=5)
    assert run(engine, [request("a", prompt, max_tokens=40, ignore_eos=True)]) == expected
    assert expected["a"].token_ids == answer[: len(expected["a"].token_ids)]
    assert drafting.counts.total.num_accepted


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(8))
def test_nan_in_a_row_of_the_answer_ends_only_that_request(seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(1, 48) for _ in range(9)]
    poison = continuation(prompt, 7)[rng.randrange(6)]
    requests = [request("bad", prompt, ignore_eos=True), request("good", [1, 2, 3], max_tokens=20)]
    expected = run(make_engine(PoisonedRunner(poison)), requests)
    engine = make_engine(PoisonedRunner(poison))
    answers = {"bad": continuation(prompt, 30), "good": continuation([1, 2, 3], 30)}
    give_drafts(engine, Oracle(answers, 0.8, seed=seed, vocab_size=50), most=4)
    assert run(engine, requests) == expected
    assert expected["bad"].end is FinishReason.ERROR


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_a_sampler_that_raises_fails_one_request_after_its_tokens(seed: int) -> None:
    sampler = FailingSampler(frozenset([EOS]))
    engine = engine_of(LocalExecutor(FakeRunner(), sampler))
    bad, good = continuation([1, 2], 30), continuation([4, 5], 30)
    give_drafts(engine, Oracle({"bad": bad, "good": good}, 0.9, seed=seed, vocab_size=50), most=7)
    answers = run(
        engine,
        [
            request("bad", [1, 2], seed=99, ignore_eos=True),
            request("good", [4, 5], ignore_eos=True),
        ],
    )
    assert answers["bad"].token_ids == bad[:5]
    assert answers["bad"].end is FinishReason.ERROR
    assert answers["good"].token_ids == good[:10]


@pytest.mark.faults
def test_a_step_that_raises_loses_its_drafts_only() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    answers = {"a": continuation([1, 2], 40), "b": continuation([3, 4], 40)}
    give_drafts(engine, Oracle(answers, vocab_size=50), most=5)
    for name, prompt in (("a", [1, 2]), ("b", [3, 4])):
        engine.add(request(name, prompt, max_tokens=40, ignore_eos=True))
    found = {"a": Answer(), "b": Answer()}
    step = 0
    while engine.has_work:
        runner.fails_next = step in (2, 4)
        for delta in engine.step():
            note(found[delta.request_id], delta)
        engine.check_integrity()
        step += 1
    assert answers_of(found) == answers


def test_aborted_requests_leave_no_page() -> None:
    rng = random.Random(5)
    for round_number in range(30 if EVERY_CASE else 14):
        requests = crowd(rng)
        expected = run(make_engine(FakeRunner()), requests)
        engine = make_engine(FakeRunner(), 24)
        give_drafts(
            engine, Oracle(answers_of(expected), 0.7, seed=round_number, vocab_size=50), most=16
        )
        for one in requests:
            engine.add(one)
        found = {one.request_id: Answer() for one in requests}
        while engine.has_work:
            if rng.random() < 0.1:
                engine.abort(rng.choice(requests).request_id)
            for delta in engine.step():
                note(found[delta.request_id], delta)
            engine.check_integrity()
        load = engine.stats().load
        assert load.num_free_pages == load.num_pages
        for name, answer in found.items():
            if answer.end is FinishReason.ABORT:
                count = len(answer.token_ids)
                assert answer.token_ids == expected[name].token_ids[:count]
            else:
                assert answer == expected[name]


def test_drafts_take_only_what_is_left() -> None:
    """No page is taken from the prefix cache, and no prompt waits for a draft."""
    engine = make_engine(FakeRunner(), 12)
    answer = continuation([1, 2, 3], 100)
    give_drafts(engine, Oracle({"b": answer}, vocab_size=50), most=16)
    run(engine, [request("a", list(range(1, 49)) * 2, max_tokens=2)])
    cached = engine.stats().load.num_cached_pages
    assert cached
    engine.add(request("b", [1, 2, 3], max_tokens=60, ignore_eos=True))
    told: list[TokenDelta] = []
    while engine.has_work:
        told += engine.step()
        held = engine.stats().load.num_used_pages
        tokens = 3 + sum(len(delta.token_ids) for delta in told)
        assert held <= -(-tokens // 16), f"{held} pages for {tokens} tokens after the step"
    assert engine.stats().counts.num_evicted_pages == 0 or cached == 0


def test_each_token_tells_the_draft_that_had_it() -> None:
    engine, answer = make_engine(FakeRunner()), continuation([1, 2, 3], 30)
    give_drafts(engine, Oracle({"a": answer}, vocab_size=50), most=3)
    asked = request("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    engine.add(replace(asked, wants_routed_experts=True))
    told = list[str]()
    while engine.has_work:
        for delta in engine.step():
            told += [each.drafter for each in delta.routed_experts or ()]
    assert told == ["", "head", "head", "head", "", "head", "head", "head", ""]


class CountingSampler(FailingSampler):
    """Counts its calls."""

    num_calls = 0

    def sample(self, logits_SV: Tensor, points: Any, masks: Any = None) -> list[Sampled]:
        self.num_calls += 1
        return super().sample(logits_SV, points, masks)


def test_rows_without_history_are_sampled_in_one_call() -> None:
    def calls(**params: Any) -> int:
        sampler = CountingSampler(frozenset([EOS]))
        engine: Engine = engine_of(LocalExecutor(FakeRunner(), sampler))
        give_drafts(engine, Oracle({"a": continuation([1, 2], 30)}, vocab_size=50), most=5)
        run(engine, [request("a", [1, 2], max_tokens=7, ignore_eos=True, **params)])
        return sampler.num_calls

    assert calls() == 2
    assert calls(presence_penalty=0.001) == 7
