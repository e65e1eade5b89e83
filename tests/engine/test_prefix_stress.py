"""Random arrivals, turns, choices, aborts, failing steps and NaNs on small pools, on the fake
model.

After every step, page counts agree, a cached page holds the tokens of its key, and no free page
holds an unknown NaN. At the end, every answer is the cold one, and no page is held.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from moe_serve.cache.events.change_record import ChangeRecord, PublishedPage, update
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.step_plan import StepPlan
from tests.support.engine.fake_runner import (
    NAN,
    PAGE_SIZE,
    VOCAB_SIZE,
    FakeRunner,
    continuation,
    next_token,
)
from tests.support.engine.runs import give_runs
from tests.support.sampled_cases import EVERY_CASE

POISON = 49
MAX_MODEL_LEN = 160
_NUM_TURNS = 150


class FaultyRunner(FakeRunner):
    """Fails at random after writing NaNs; a NaN shows in the logits of the next few pages only."""

    def __init__(self, rng: random.Random, *, window: int, failure_rate: float) -> None:
        super().__init__()
        self._rng, self._window, self.failure_rate = rng, window, failure_rate
        self.nan_after_token = POISON

    def run(self, plan: StepPlan) -> Tensor:
        if self._rng.random() < self.failure_rate:
            for piece in plan.slices:
                self._write(piece.start, [NAN] * len(piece.token_ids), piece.page_table)
            raise RuntimeError("bad luck")
        return super().run(plan)

    def _rows(self, first: int, end: int, table: tuple[int, ...]) -> list[Tensor]:
        rows = []
        for position in range(first, end):
            num_pages = position // PAGE_SIZE + 1
            slots = [slot for page in table[:num_pages] for slot in self.slots[page]]
            tokens = [POISON if slot == NAN else slot for slot in slots[: position + 1]]
            row = torch.zeros(VOCAB_SIZE)
            row[next_token(tokens)] = 5.0
            if NAN in slots[max(0, num_pages - self._window) * PAGE_SIZE :]:
                row[:] = float("nan")
            rows.append(row)
        return rows


class Crowd:
    """Adds and aborts requests at random and keeps their answers."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        rate = rng.choice([0.0, 0.03])
        self.record = ChangeRecord(lambda: None, lambda: None)
        self.told: dict[bytes, PublishedPage] = {}  # the pages that subscribers know
        self.taken = random.Random(seed)  # decides when they are told
        self.runner = FaultyRunner(rng, window=rng.choice([1, 2, 100]), failure_rate=rate)
        seats = rng.randint(1, 12)
        budget = rng.choice([max(seats, 3), 20, 64, 256])
        self.engine = Engine(
            LocalExecutor(self.runner, Sampler(frozenset([7]))),
            scheduler=SchedulerConfig(max_num_seqs=seats, max_batched_tokens=budget),
            num_pages=rng.randint(MAX_MODEL_LEN // PAGE_SIZE, 40),
            micro_batches=rng.randint(1, 3),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset([7]),
            has_prefix_cache=seed % 6 != 5,
            listener=self.record,
        )
        self.stems = [self._tokens(rng.randint(1, 110)) for _ in range(3)]
        self.requests: dict[str, GenerationRequest] = {}
        self.deltas: dict[str, list[TokenDelta]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 48) for _ in range(count)]

    def answer(self, name: str) -> list[int]:
        return [token for delta in self.deltas.get(name, []) for token in delta.token_ids]

    def _prompt(self) -> list[int]:
        rng, prompt = self.rng, list(self.rng.choice(self.stems))
        if self.deltas and rng.random() < 0.3:  # the next turn
            name = rng.choice(list(self.deltas))
            prompt = [*self.requests[name].prompt_token_ids, *self.answer(name)][:130]
        elif rng.random() < 0.5:
            prompt = prompt[: rng.randint(1, len(prompt))]
        prompt += self._tokens(rng.choice([0, 1, rng.randint(0, 25)]))
        if rng.random() < 0.1:
            prompt[rng.randrange(len(prompt))] = POISON
        return prompt

    def add(self) -> None:
        rng, prompt = self.rng, self._prompt()
        num_choices, salt = rng.choice([1, 1, 1, 4]), rng.choice(["", "", "s"])
        params = {
            "temperature": 0.0,
            "max_tokens": rng.choice([1, rng.randint(1, min(40, MAX_MODEL_LEN - len(prompt)))]),
            "ignore_eos": rng.random() < 0.5,
        }
        with_prompt = params | {"prompt_logprobs": 1 if rng.random() < 0.15 else None}
        for choice in range(num_choices):
            request = GenerationRequest(
                request_id=f"r{len(self.requests)}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(**(params if choice else with_prompt)),
                choice=choice,
                cache_salt=salt,
            )
            self.requests[request.request_id] = request
            self.engine.add(request)

    def step(self) -> None:
        for delta in self.engine.step():
            self.deltas.setdefault(delta.request_id, []).append(delta)
        self.engine.check_integrity()
        scheduler, slots = self.engine._scheduler, self.runner.slots
        assert scheduler.running or not scheduler.sharing._computing, "nobody runs, some wait"
        tree = scheduler.cache.tree
        for page in tree:
            tokens = [token for token in tree._tokens[page].tolist() if token >= 0]
            assert slots[page][: len(tokens)] == tokens, f"page {page} holds {slots[page]}"
            assert NAN not in slots[page], f"page {page} is shared and holds a NaN"
        if self.taken.random() < 0.5 and (changes := self.record.take()) is not None:
            update(self.told, changes)
            assert {page.key for page in self.told.values()} == {
                tree.key_of(page) for page in tree if tree.is_full(page)
            }, "subscribers know other pages"
        free = set(scheduler.cache._pool._free) - set(scheduler._unproven_pages)
        dirty = [page for page in free if NAN in slots.get(page, ())]
        assert not dirty, f"pages {dirty} are free, hold a NaN, and would not be cleared"


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(18 if EVERY_CASE else 9))
def test_whatever_happens_answers_are_cold_and_faults_stay(seed: int) -> None:
    check(Crowd(seed), seed)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(18, 26 if EVERY_CASE else 22))
def test_the_same_with_several_tokens_per_step(seed: int) -> None:
    """No step fails as a whole, because it could leave NaNs behind the scheduled rows of a page."""
    crowd = Crowd(seed)
    crowd.runner.failure_rate = 0.0
    give_runs(crowd.engine, most=4, seed=seed)
    check(crowd, seed)


def check(crowd: Crowd, seed: int) -> None:
    for _ in range(_NUM_TURNS):
        if crowd.rng.random() < 0.35:
            crowd.add()
        if crowd.requests and crowd.rng.random() < 0.1:
            crowd.engine.abort(crowd.rng.choice(list(crowd.requests)))
        if crowd.engine.has_work:
            crowd.step()
    most = 20 * sum(len(r.prompt_token_ids) + 40 for r in crowd.requests.values())
    for _ in range(most):
        if not crowd.engine.has_work:
            break
        crowd.step()
    assert not crowd.engine.has_work, "somebody starves"
    stats = crowd.engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "pages are held without an owner"
    for name, request in crowd.requests.items():
        prompt, answer = list(request.prompt_token_ids), crowd.answer(name)
        end = crowd.deltas[name][-1]
        assert answer == continuation(prompt, len(answer)), f"{seed=}, {name}"
        if end.finish_reason is FinishReason.LENGTH:
            assert len(answer) == request.params.max_tokens, f"{seed=}, {name}"
        if end.finish_reason is FinishReason.ERROR:
            is_own = POISON in prompt or "bad luck" in (end.error or "")
            assert is_own, f"{seed=}, {name} failed of another's fault: {end.error}"
