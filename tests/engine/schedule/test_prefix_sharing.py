"""Page sharing on the fake model: who computes a page, who waits for it, and faults.

The fake model reads every token back from the pages, so each answer checks the pages it was
computed from.
"""

from __future__ import annotations

import random

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from tests.support.engine.fake_runner import NAN, FakeRunner, continuation
from tests.support.sampled_cases import EVERY_CASE


def make_engine(
    runner: FakeRunner,
    *,
    num_pages: int = 64,
    budget: int = 256,
    seats: int = 8,
    parts: int = 1,
    has_prefix_cache: bool = True,
) -> Engine:
    return Engine(
        LocalExecutor(runner, Sampler(frozenset())),
        scheduler=SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget),
        num_pages=num_pages,
        micro_batches=parts,
        max_model_len=160,
        eos_token_ids=frozenset(),
        has_prefix_cache=has_prefix_cache,
    )


def request(name: str, prompt: list[int], salt: str = "", **params: object) -> GenerationRequest:
    fields = {"temperature": 0.0, "max_tokens": 4} | params
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**fields),  # type: ignore[arg-type]
        cache_salt=salt,
    )


def step(engine: Engine, result: dict[str, list[TokenDelta]]) -> None:
    for delta in engine.step():
        result.setdefault(delta.request_id, []).append(delta)
    engine.check_integrity()


def run(engine: Engine, *requests: GenerationRequest) -> dict[str, list[TokenDelta]]:
    """Steps until the engine is idle and checks its integrity after every step."""
    result: dict[str, list[TokenDelta]] = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        step(engine, result)
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "idle pages are free pages"
    return result


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 48) for _ in range(length)]


@pytest.mark.parametrize("length", [*range(1, 4), *range(30, 52)])
def test_a_second_request_computes_what_is_left(length: int) -> None:
    prompt = prompt_of(64)
    engine = make_engine(runner := FakeRunner())
    run(engine, request("first", prompt))
    num_before = runner.num_computed_tokens
    deltas = run(engine, request("second", prompt[:length]))["second"]
    assert tokens(deltas) == continuation(prompt[:length], 4), f"{length=}"
    in_page = (length - 1) % 16
    num_cached = length - 1 if in_page >= 2 else length - 1 - in_page
    assert {d.num_cached_tokens for d in deltas} == {num_cached}, f"{length=}"
    assert runner.num_computed_tokens - num_before == length - num_cached + 3
    counts = engine.stats().counts
    assert (counts.num_queried_tokens, counts.num_hit_tokens) == (64 + length, num_cached)


def test_the_next_turn_finds_the_answer_too() -> None:
    engine = make_engine(FakeRunner())
    turn = prompt_of(20)
    answer = tokens(run(engine, request("a", turn, max_tokens=35))["a"])
    turn = [*turn, *answer, 1, 2, 3]
    deltas = run(engine, request("b", turn))["b"]
    assert deltas[0].num_cached_tokens == 54, "all that was computed: all but the last token"
    assert tokens(deltas) == continuation(turn, 4)


def test_another_salt_shares_nothing() -> None:
    engine = make_engine(FakeRunner())
    prompt = prompt_of(40)
    for index, (salt, num_cached) in enumerate([("", 0), ("x", 0), ("y", 0), ("x", 39), ("", 39)]):
        (deltas,) = run(engine, request(f"r{index}", prompt, salt)).values()
        assert deltas[0].num_cached_tokens == num_cached, f"{salt=}"


@pytest.mark.parametrize("budget", [256, 16, 7])
def test_equal_prompts_that_arrive_together_are_computed_once(budget: int) -> None:
    prompt = prompt_of(71)
    engine = make_engine(runner := FakeRunner(), budget=budget)
    requests = [request(f"r{i}", prompt, max_tokens=1) for i in range(5)]
    result = run(engine, *requests)
    for name, deltas in result.items():
        assert tokens(deltas) == continuation(prompt, 1), name
    # The others find 4 whole pages, and if the first one still runs, what it has of the fifth.
    assert 71 + 4 <= runner.num_computed_tokens <= 71 + 4 * 7, f"{budget=}"


def test_choices_copy_the_page_that_the_first_one_still_writes() -> None:
    prompt = prompt_of(71)
    engine = make_engine(runner := FakeRunner())
    result = run(engine, *(request(f"r{i}", prompt, max_tokens=30) for i in range(4)))
    for name, deltas in result.items():
        assert tokens(deltas) == continuation(prompt, 30), name
    assert len(runner.copied) == 3 and len({source for source, _ in runner.copied}) == 1
    assert [result[f"r{i}"][0].num_cached_tokens for i in range(4)] == [0, 70, 70, 70]


def test_those_behind_a_waiting_one_start_first() -> None:
    long = prompt_of(100)
    engine = make_engine(runner := FakeRunner(), budget=40)
    for one in (request("a", long), request("b", long), request("c", [5, 6])):
        engine.add(one)
    engine.step()
    assert [len(piece.token_ids) for piece in runner.plans[0].slices] == [40]
    engine.step()
    engine.step()  # "a" has 20 tokens left: "b" waits for the 6 whole pages, "c" starts
    assert sorted(len(piece.token_ids) for piece in runner.plans[2].slices) == [2, 20]
    run(engine)


@pytest.mark.faults
@pytest.mark.parametrize("end", ["abort", "fail", "nan"])
def test_who_waits_goes_on_when_the_other_one_ends(end: str) -> None:
    prompt = prompt_of(90)
    engine = make_engine(runner := FakeRunner(), budget=32)
    engine.add(request("a", [*prompt, 49, *prompt_of(40, 2)]))
    engine.add(request("b", prompt))
    result: dict[str, list[TokenDelta]] = {}
    step(engine, result)
    if end == "abort":
        engine.abort("a")
    runner.fails_on_token = 49 if end == "fail" else None
    runner.nan_after_token = 49 if end == "nan" else None
    while engine.has_work:
        step(engine, result)
    assert result["a"][-1].finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
    assert tokens(result["b"]) == continuation(prompt, 4)


def test_a_preempted_sequence_finds_its_own_pages() -> None:
    engine = make_engine(runner := FakeRunner(), num_pages=10)
    prompts = {f"r{i}": prompt_of(40, i) for i in range(3)}
    result = run(engine, *(request(n, p, max_tokens=60) for n, p in prompts.items()))
    for name, prompt in prompts.items():
        assert tokens(result[name]) == continuation(prompt, 60), name
    num_preemptions = engine.stats().counts.num_preemptions
    num_least = 3 * (40 + 59)
    assert num_preemptions > 0
    assert runner.num_computed_tokens < num_least + 40 * num_preemptions, "each found some of it"


def test_prompt_logprobs_take_nothing_and_give() -> None:
    prompt = prompt_of(40)
    engine = make_engine(FakeRunner())
    (cold,) = run(make_engine(FakeRunner()), request("a", prompt, prompt_logprobs=1)).values()
    for name in ("a", "b"):
        (deltas,) = run(engine, request(name, prompt, prompt_logprobs=1)).values()
        assert deltas[0].prompt_logprobs == cold[0].prompt_logprobs
        assert deltas[0].num_cached_tokens == 0
    assert engine.stats().counts.num_queried_tokens == 0
    (deltas,) = run(engine, request("c", prompt)).values()
    assert deltas[0].num_cached_tokens == 39


def test_without_the_cache_nothing_is_kept() -> None:
    engine = make_engine(runner := FakeRunner(), has_prefix_cache=False)
    prompt = prompt_of(40)
    for name in ("a", "b"):
        (deltas,) = run(engine, request(name, prompt)).values()
        assert deltas[-1].num_cached_tokens == 0
    assert runner.num_computed_tokens == 2 * 43
    assert engine.stats().load.num_cached_pages == engine.stats().counts.num_queried_tokens == 0


def cached_tokens(engine: Engine, runner: FakeRunner) -> list[int]:
    return [t for page in engine._scheduler.cache.tree for t in runner.slots[page]]


@pytest.mark.parametrize("budget", [256, 20])
def test_pages_of_a_request_with_nan_never_enter(budget: int) -> None:
    """The request also takes back finite pages that it shared while its prompt was read."""
    bad = [*prompt_of(40), 49, *prompt_of(30, 1)]
    engine = make_engine(runner := FakeRunner(), budget=budget, seats=3)
    runner.nan_after_token = 49
    good = {f"good{i}": prompt_of(50, i + 2) for i in range(6)}
    result = run(engine, request("bad", bad), *(request(n, p) for n, p in good.items()))
    assert result["bad"][-1].finish_reason is FinishReason.ERROR
    for name, prompt in good.items():
        assert tokens(result[name]) == continuation(prompt, 4), name
    found = cached_tokens(engine, runner)
    assert NAN not in found and len(found) == 6 * 64, "four pages of each good one"
    runner.nan_after_token = None
    (deltas,) = run(engine, request("again", bad)).values()
    assert deltas[0].num_cached_tokens == 0
    assert tokens(deltas) == continuation(bad, 4)


class Forgetful(FakeRunner):
    """Does not see pages that hold a NaN, as if they were out of a window's reach."""

    def _rows(self, first: int, end: int, table: tuple[int, ...]) -> list:
        clean = [[0] * 16 if NAN in self.slots[p] else self.slots[p] for p in table]
        saved, self.slots = self.slots, dict(zip(table, clean, strict=True))
        rows = super()._rows(first, end, table)
        self.slots = saved
        return rows


def test_a_page_found_unsound_is_zeroed_and_keeps_all_behind_it_private() -> None:
    """The page is found even if the logits do not show the NaN."""
    prompt = prompt_of(70)
    engine = make_engine(runner := Forgetful())
    runner.nan_after_token = prompt[20] = 49
    (deltas,) = run(engine, request("a", prompt)).values()
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert engine.stats().load.num_cached_pages == 1, "the page before it"
    run(engine, request("b", [1, 2]))
    assert len(runner.cleared) == 4, "the others of 73 tokens, before anyone gets them"
    assert all(NAN not in slots for slots in runner.slots.values())


def test_without_the_cache_a_hidden_nan_is_zeroed_too() -> None:
    prompt = prompt_of(70)
    engine = make_engine(runner := Forgetful(), has_prefix_cache=False)
    runner.nan_after_token = prompt[20] = 49
    (deltas,) = run(engine, request("a", prompt)).values()
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    run(engine, request("b", [1, 2]))
    assert len(runner.cleared) == 5, "all pages of 73 tokens"
    assert all(NAN not in slots for slots in runner.slots.values())


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(16 if EVERY_CASE else 8))
def test_random_families_of_prompts_faults_and_aborts(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        runner := FakeRunner(),
        num_pages=rng.randint(10, 40),
        budget=rng.choice([3, 20, 64, 256]),
        seats=rng.randint(1, 8),
        parts=rng.randint(1, 3),
    )
    runner.fails_on_token, runner.nan_after_token = (None, 49) if seed % 2 else (49, None)
    stems = [prompt_of(rng.randint(1, 90), 100 + i) for i in range(4)]
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    result: dict[str, list[TokenDelta]] = {}
    for _ in range(200):
        if rng.random() < 0.35:
            name, stem = f"r{len(prompts)}", rng.choice(stems)
            stem = stem[: rng.randint(1, len(stem))]
            prompt = [*stem, *prompt_of(rng.randint(0, 40), rng.randrange(10**6))]
            if rng.random() < 0.1:
                prompt[rng.randrange(len(prompt))] = 49
            prompts[name] = prompt
            salt = rng.choice(["", "", "s"])
            engine.add(request(name, prompt, salt, max_tokens=rng.randint(1, 30)))
        if prompts and rng.random() < 0.1:
            aborted.add(name := rng.choice(list(prompts)))
            engine.abort(name)
        if engine.has_work:
            step(engine, result)
    for name, deltas in run(engine).items():
        result.setdefault(name, []).extend(deltas)
    for name, prompt in prompts.items():
        answer = tokens(result[name])
        if 49 in prompt:
            assert not answer, name
        else:
            assert answer == continuation(prompt, len(answer)), f"{seed=}, {name}"
            assert answer or name in aborted, name
    assert NAN not in cached_tokens(engine, runner)
    assert engine.stats().counts.num_hit_tokens > 0
