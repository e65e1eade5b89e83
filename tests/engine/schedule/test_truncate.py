"""Pages taken back from running sequences at any length change no answer."""

from __future__ import annotations

import random

import pytest

from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from tests.support.engine.fake_runner import PAGE_SIZE, FakeRunner, continuation


class Shop:
    """An engine whose running sequences lose pages between steps."""

    def __init__(self, num_pages: int = 64, *, has_prefix_cache: bool = True) -> None:
        self.runner = FakeRunner()
        self.engine = Engine(
            LocalExecutor(self.runner, Sampler(frozenset())),
            scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
            num_pages=num_pages,
            micro_batches=1,
            max_model_len=160,
            eos_token_ids=frozenset(),
            has_prefix_cache=has_prefix_cache,
        )
        self.answers: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[int, ...]] = {}

    def add(self, prompt: list[int], max_tokens: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.answers[name] = tuple(prompt), []
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.engine.add(
            GenerationRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params)
        )

    def step(self) -> None:
        for delta in self.engine.step():
            self.answers[delta.request_id] += delta.token_ids
        self.check()

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        self.engine._scheduler.truncate(sequence, num_tokens)
        self.check()

    def check(self) -> None:
        self.engine.check_integrity()
        tree = self.engine._scheduler.cache.tree
        for page in tree:
            tokens = [token for token in tree._tokens[page].tolist() if token >= 0]
            assert self.runner.slots[page][: len(tokens)] == tokens, f"page {page} was overwritten"

    @property
    def running(self) -> list[Sequence]:
        return self.engine._scheduler.running

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        assert stats.load.num_free_pages == stats.load.num_pages, "pages are held without an owner"
        for name, prompt in self.prompts.items():
            answer = self.answers[name]
            assert answer == continuation(list(prompt), len(answer)), name


@pytest.mark.parametrize("seed", range(30))
def test_random_lengths_beside_shared_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    shop = Shop(rng.choice([12, 20, 64]), has_prefix_cache=seed % 5 != 4)
    stems = [[rng.randrange(1, 48) for _ in range(rng.randint(1, 100))] for _ in range(2)]
    for _ in range(80):
        if rng.random() < 0.2 and len(shop.prompts) < 12:
            stem = rng.choice(stems)[: rng.randint(1, 100)]
            tail = [rng.randrange(1, 48) for _ in range(rng.randint(0, 20))]
            shop.add(stem + tail, rng.randint(1, 30))
        if rng.random() < 0.15 and shop.running:
            sequence = rng.choice(shop.running)
            shop.truncate(sequence, rng.randint(0, len(sequence.page_table) * PAGE_SIZE))
        if shop.engine.has_work:
            shop.step()
    shop.finish()


def test_pages_behind_the_length_are_free_and_zeroed_before_their_next_use() -> None:
    shop = Shop()
    shop.add(list(range(1, 21)), 5)
    shop.step()
    (sequence,) = shop.running
    cache = shop.engine._scheduler.cache
    sequence.page_table += (spare := cache.allocate(3))
    shop.truncate(sequence, sequence.num_tokens)
    assert (len(sequence.page_table), sequence.num_computed_tokens) == (2, 20), "it loses no work"
    shop.step()
    assert sorted(shop.runner.cleared) == sorted(spare)
    shop.finish()


def test_a_shared_page_is_not_written_again() -> None:
    """The sequence computes its tokens on a page of its own."""
    shop = Shop()
    prompt = [3 + i % 40 for i in range(40)]
    shop.add(prompt, 3)
    shop.finish()
    shop.add([*prompt, 1], 12)
    shop.step()
    (sequence,) = shop.running
    assert sequence.num_shared_pages >= 2
    first, second = sequence.page_table[:2]
    shop.truncate(sequence, 2 * PAGE_SIZE - 3)
    assert sequence.page_table == [first] and sequence.num_computed_tokens == PAGE_SIZE
    assert shop.engine._scheduler.cache.tree.find(sequence.page_keys[2]) == second, (
        "it stays cached"
    )
    shop.finish()


def test_a_page_of_ones_own_keeps_its_first_tokens() -> None:
    shop = Shop()
    shop.add([5] * 20, 12)
    shop.step()
    (sequence,) = shop.running
    table = list(sequence.page_table)
    shop.truncate(sequence, 18)
    assert sequence.page_table == table and sequence.num_computed_tokens == 18
    shop.truncate(sequence, 0)
    assert sequence.page_table == [] and sequence.num_computed_tokens == 0
    shop.finish()


@pytest.mark.parametrize("is_truncated", [False, True])
def test_others_wait_for_no_page_that_was_taken_back(is_truncated: bool) -> None:
    """Other sequences normally wait for pages that a running sequence computes."""
    shop = Shop()
    stem = [7 + i % 30 for i in range(100)]
    shop.add(stem, 5)
    shop.step()  # it reads 64 tokens of its prompt
    shop.add(stem, 5)
    if is_truncated:
        shop.truncate(shop.running[0], 60)
    shop.step()
    assert len(shop.running) == 1 + is_truncated
    shop.finish()
