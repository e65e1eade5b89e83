"""Requests that forget the middle of their context, on the fake model: each token is a hash of the
tokens whose pages it saw."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from moe_serve.engine.engine import Engine
from moe_serve.engine.request.kv_window import KVWindow
from moe_serve.engine.request.request import GenerationRequest
from tests.engine.schedule.test_page_tiers import engine_with
from tests.support.engine.fake_engine import make_engine, request, run, tokens
from tests.support.engine.fake_runner import PAGE_SIZE, FakeRunner
from tests.support.engine.fake_store import FakeStore
from tests.support.engine.windows import seen, windowed_answer

PROMPT = [1 + index % 40 for index in range(70)]
WINDOW = KVWindow(window=20, sinks=4)


def windowed(name: str, prompt: list[int], count: int, window: KVWindow) -> GenerationRequest:
    return request(name, prompt, max_tokens=count, kv_window=window)


@pytest.mark.parametrize("size", [8, 16])
def test_hidden_pages_are_those_of_the_definition(size: int) -> None:
    for sinks in (0, 1, size, size + 1):
        for window in (size, size + 3, 3 * size):
            wish = KVWindow(window=window, sinks=sinks)
            for position in range(8 * size):
                hidden = wish.hidden_pages(position, size)
                kept = set(range(position + 1)).difference(
                    range(hidden.start * size, hidden.stop * size)
                )
                assert sorted(kept) == seen(position, 0, wish, size), f"{wish}, {position=}"
                end = position + wish.run(position, size)
                same = [wish.hidden_pages(each, size) for each in range(position, end + 1)]
                assert same[:-1] == [hidden] * (end - position), f"{wish}, {position=}"
                assert len(same[-1]) > len(hidden), f"{wish}: the run from {position} ends at {end}"
                assert bool(hidden) == (position >= wish.first_hiding(size))


def test_an_answer_is_that_of_the_definition() -> None:
    engine = make_engine(FakeRunner())
    engine.add(windowed("a", PROMPT, 60, WINDOW))
    deltas = run(engine)["a"]
    assert tokens(deltas) == windowed_answer(PROMPT, 60, WINDOW)
    dropped = [delta.num_dropped_tokens for delta in deltas]
    assert dropped[0] == 0, "the prompt is read with all its keys"
    assert dropped[-1] == 80, "pages 1 to 5 end before 129 - 20"
    assert all(one <= other for one, other in pairwise(dropped))


def test_pages_are_free_while_the_answer_grows() -> None:
    engine = make_engine(FakeRunner())
    engine.add(windowed("a", PROMPT, 60, WINDOW))
    held = []
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        load = engine.stats().load
        held.append(load.num_pages - load.num_free_pages)
    assert max(held) == 5, "the pages of the prompt and of one token"
    assert max(held[5:-1]) <= 4, "a page of sinks, and a window of at most three"


@pytest.mark.parametrize("pages", [12, 20, 64])
@pytest.mark.parametrize("budget", [7, 64])
def test_company_chunks_and_preemptions_change_nothing(pages: int, budget: int) -> None:
    rng = np.random.default_rng(pages + budget)
    engine = make_engine(FakeRunner(), num_pages=pages, budget=budget)
    wanted: dict[str, list[int]] = {}
    for index in range(12):
        prompt = (PROMPT + rng.integers(1, 40, 20).tolist())[: int(rng.integers(1, 90))]
        count = int(rng.integers(1, 160 - len(prompt)))
        window = KVWindow(window=int(rng.integers(16, 40)), sinks=int(rng.integers(0, 20)))
        if index % 3 == 0:
            window = KVWindow(window=1000)  # sees all
        name = f"r{index}"
        wanted[name] = windowed_answer(prompt, count, window)
        params = {} if index % 3 == 0 else {"kv_window": window}
        engine.add(request(name, prompt, max_tokens=count, **params))
    found = {name: tokens(deltas) for name, deltas in run(engine).items()}
    assert found == wanted
    if pages == 12:
        assert engine.stats().counts.num_preemptions > 3, "the pool was meant to be too small"


def test_a_preempted_answer_is_computed_again_with_the_same_keys() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, num_pages=10, max_num_seqs=2)
    other = PROMPT[60:0:-1]
    engine.add(request("b", other, max_tokens=95))
    engine.add(windowed("a", PROMPT, 80, WINDOW))
    answers = run(engine)
    assert engine.stats().counts.num_preemptions > 0, "the pool was meant to be too small"
    assert tokens(answers["a"]) == windowed_answer(PROMPT, 80, WINDOW)
    assert tokens(answers["b"]) == windowed_answer(other, 95, KVWindow(window=1000))


def step_until(engine: Engine, name: str, count: int) -> list[int]:
    """Steps until a request has `count` tokens, and returns those it got on the way."""
    found: list[int] = []
    while len(found) < count:
        for delta in engine.step():
            found += delta.token_ids if delta.request_id == name else ()
        engine.check_integrity()
    return found


def test_only_pages_that_see_all_keys_are_shared() -> None:
    engine = make_engine(FakeRunner())
    engine.add(windowed("a", PROMPT, 60, WINDOW))
    answer = tokens(run(engine)["a"])
    engine.add(request("b", [*PROMPT, *answer, 7], max_tokens=3))
    (first, *_) = deltas = run(engine)["b"]
    assert first.num_cached_tokens == 64, "the answer's rows saw other keys"
    assert tokens(deltas) == windowed_answer([*PROMPT, *answer, 7], 3, KVWindow(window=1000))


def test_others_keep_the_pages_that_one_drops() -> None:
    engine = make_engine(FakeRunner())
    engine.add(request("other", [*PROMPT, 3], max_tokens=70))
    found = step_until(engine, "other", 5)
    engine.add(windowed("a", [*PROMPT, 4], 60, WINDOW))
    answers = run(engine)
    assert answers["a"][0].num_cached_tokens >= 64, "it began with the pages of the other"
    assert tokens(answers["a"]) == windowed_answer([*PROMPT, 4], 60, WINDOW)
    assert found + tokens(answers["other"]) == windowed_answer(
        [*PROMPT, 3], 70, KVWindow(window=1000)
    )


def test_a_full_cache_leaves_room_for_few_copies_at_a_time() -> None:
    """The window's pages are copied as pages become idle, and every page is freed in the end."""
    prompt, window = [1 + index % 37 for index in range(140)], KVWindow(window=100)
    engine = make_engine(FakeRunner(), num_pages=10)
    engine.add(windowed("a", prompt, 19, window))
    assert tokens(run(engine)["a"]) == windowed_answer(prompt, 19, window)
    assert engine.stats().counts.num_preemptions == 0


def test_a_tier_gets_no_page_of_the_answer() -> None:
    store, runner = FakeStore(), FakeRunner()
    engine = engine_with(store, runner)
    engine.add(windowed("a", PROMPT, 60, WINDOW))
    run(engine)
    engine.close()
    assert len(store.pages) == len(PROMPT) // PAGE_SIZE


def test_choices_share_their_prompt() -> None:
    engine = make_engine(FakeRunner())
    for index in range(3):
        engine.add(windowed(f"r{index}", PROMPT, 50, WINDOW))
    answers = run(engine)
    wanted = windowed_answer(PROMPT, 50, WINDOW)
    assert all(tokens(deltas) == wanted for deltas in answers.values())
    assert engine.stats().counts.num_hit_tokens > 0
