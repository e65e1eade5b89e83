"""The engine on a fake model: ends, aborts, faults, and nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.engine.schedule.policy.arrival_order import ArrivalOrder
from moe_serve.engine.schedule.policy.longest_first import split
from tests.support.engine.fake_engine import make_engine, request, run, tokens
from tests.support.engine.fake_runner import VOCAB_SIZE, FakeRunner, continuation
from tests.support.sampled_cases import EVERY_CASE


def test_one_request() -> None:
    engine = make_engine(FakeRunner())
    engine.add(request("a", [3, 4, 5]))
    deltas = run(engine)["a"]
    assert tokens(deltas) == continuation([3, 4, 5], 10)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert all(d.finish_reason is None for d in deltas[:-1])


def test_a_full_context_ends_by_length() -> None:
    engine = make_engine(FakeRunner(), num_pages=10)
    engine.add(request("a", [7] * 150, max_tokens=None))
    deltas = run(engine)["a"]
    assert len(tokens(deltas)) == 10
    assert deltas[-1].finish_reason is FinishReason.LENGTH


def test_stop_tokens_eos_min_tokens_and_ignore_eos() -> None:
    answer = continuation([11], 10)
    eos = frozenset({answer[2]})
    cases = {
        "eos": ({}, answer[:3], FinishReason.STOP),
        "ignored": ({"ignore_eos": True}, answer, FinishReason.LENGTH),
        "own": ({"stop_token_ids": (answer[1],)}, answer[:2], FinishReason.STOP),
    }
    for name, (params, expected, reason) in cases.items():
        engine = make_engine(FakeRunner(), eos=eos)
        engine.add(request(name, [11], **params))
        deltas = run(engine)[name]
        assert tokens(deltas) == expected, name
        assert deltas[-1].finish_reason is reason, name
    engine = make_engine(FakeRunner(), eos=eos)
    engine.add(request("min", [11], min_tokens=6))
    assert len(tokens(run(engine)["min"])) >= 6


def test_abort_ends_a_request_within_a_step_and_leaves_the_others() -> None:
    engine = make_engine(FakeRunner(), max_num_seqs=2)
    for name in "abc":
        engine.add(request(name, [ord(name)] * 20))
    engine.step()
    engine.abort("a")  # running
    engine.abort("c")  # waiting
    engine.abort("nobody")
    engine.check_integrity()
    result = run(engine)
    assert result["a"][-1].finish_reason is FinishReason.ABORT
    assert result["c"][-1].finish_reason is FinishReason.ABORT
    assert result["b"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.faults
def test_a_failed_step_ends_its_requests_and_nobody_else() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, max_num_seqs=1)
    engine.add(request("a", [1, 2]))
    engine.add(request("b", [3, 4]))
    runner.fails_next = True
    result = run(engine)
    assert result["a"][-1].finish_reason is FinishReason.ERROR
    assert "the device is on fire" in (result["a"][-1].error or "")
    assert tokens(result["b"]) == continuation([3, 4], 10)


@pytest.mark.faults
def test_only_the_culprit_of_a_failed_step_fails() -> None:
    runner = FakeRunner()
    runner.fails_on_token = 49
    engine = make_engine(runner)
    for name, prompt in {"a": [1, 2], "bad": [3, 49], "c": [4, 5]}.items():
        engine.add(request(name, prompt))
    result = run(engine)
    assert result["bad"][-1].finish_reason is FinishReason.ERROR
    assert "token 49 is poison" in (result["bad"][-1].error or "")
    assert tokens(result["a"]) == continuation([1, 2], 10)
    assert tokens(result["c"]) == continuation([4, 5], 10)


@pytest.mark.faults
def test_only_the_culprit_of_failed_sampling_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def failing(self: Sampler, logits: Any, points: Any) -> Any:
        if any(p.sequence.request.request_id == "bad" for p in points):
            raise RuntimeError("no token for this one")
        return sample(self, logits, points)

    monkeypatch.setattr(Sampler, "sample", failing)
    engine = make_engine(FakeRunner())
    for name in ("a", "bad", "c"):
        engine.add(request(name, [1, 2]))
    result = run(engine)
    assert "no token for this one" in (result["bad"][-1].error or "")
    assert tokens(result["a"]) == tokens(result["c"]) == continuation([1, 2], 10)


def test_pages_that_no_valid_token_vouches_for_are_zeroed() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, budget=32)
    engine.add(request("half", [1] * 100))
    engine.step()
    engine.abort("half")
    engine.add(request("next", [2] * 5))
    run(engine)
    assert len(runner.cleared) == 2, "the two pages of the half-read prompt, before reuse"
    runner.cleared.clear()
    engine.add(request("whole", [1] * 20))
    engine.step()
    engine.abort("whole")
    run(engine)
    assert not runner.cleared, "a sampled token has proved these finite"


def test_nan_ends_its_own_request_and_its_pages_are_zeroed() -> None:
    runner = FakeRunner()
    runner.nan_after_token = 49
    engine = make_engine(runner)
    engine.add(request("bad", [1, 49]))
    engine.add(request("good", [3, 4]))
    result = run(engine)
    assert result["bad"][-1].finish_reason is FinishReason.ERROR
    assert "NaN" in (result["bad"][-1].error or "")
    assert len(runner.cleared) == 1, "the page of the request that failed"
    assert tokens(result["good"]) == continuation([3, 4], 10)


def test_prompt_logprobs_come_with_the_first_token_however_the_prompt_is_cut() -> None:
    found = []
    for budget in (64, 3):
        engine = make_engine(FakeRunner(), budget=budget)
        engine.add(request("a", [5, 6, 7, 8, 9, 10, 11], prompt_logprobs=2, logprobs=1))
        deltas = run(engine)["a"]
        entries = deltas[0].prompt_logprobs
        assert entries is not None and len(entries) == 7 and entries[0] is None
        assert [e.token_id for e in entries if e is not None] == [6, 7, 8, 9, 10, 11]
        assert all(d.prompt_logprobs is None for d in deltas[1:])
        found.append(entries)
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(12 if EVERY_CASE else 6))
def test_random_submits_and_aborts_leave_nothing(seed: int) -> None:
    rng = random.Random(seed)
    runner = FakeRunner()
    engine = make_engine(
        runner,
        num_pages=rng.randint(10, 30),
        max_num_seqs=rng.randint(1, 8),
        budget=rng.randint(1, 80),
        micro_batches=rng.randint(1, 4),
    )
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    result: dict[str, list[int]] = {}
    for _ in range(250):
        if rng.random() < 0.3:
            name = f"r{len(prompts)}"
            prompts[name] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 100))]
            engine.add(request(name, prompts[name], max_tokens=rng.randint(1, 40)))
        if prompts and rng.random() < 0.15:
            name = rng.choice(list(prompts))
            aborted.add(name)
            engine.abort(name)
        for delta in engine.step() if engine.has_work else []:
            result.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_integrity()
    for name, deltas in run(engine).items():
        result.setdefault(name, []).extend(tokens(deltas))
    for name, prompt in prompts.items():
        answer = result.get(name, [])
        assert answer == continuation(prompt, len(answer)), name
        assert answer or name in aborted, name


def test_what_moves_away_is_forgotten_by_its_policy() -> None:
    """Those that run, wait, and have ended in a step that was never told of."""
    gone: list[int] = []

    class Remembering(ArrivalOrder):
        def forget(self, sequence_ids: Iterable[int]) -> None:
            gone.extend(sequence_ids)

    engine = make_engine(FakeRunner(), max_num_seqs=2, policy=Remembering("fifo", split))
    for name in "abc":
        engine.add(request(name, [1, 2, 3]))
    engine.begin_step()
    engine.abort("a")
    assert [s.request.request_id for s in engine.surrender()] == ["b", "c"]
    assert set(gone) == {0, 1, 2}
