"""Drafts of any tokens and lengths cause no wrong token and no lost page, and keep the
distribution."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_serve.engine.drafting.draft import Draft, DraftSource
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.request import FinishReason
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampler
from moe_serve.model.step_plan import StepPlan
from tests.engine.test_runs import EOS, Answer, engine_of, make_engine, note, request, run
from tests.support.engine.fake_runner import VOCAB_SIZE, FakeRunner, continuation
from tests.support.engine.oracle import give_drafts
from tests.support.sampled_cases import EVERY_CASE

prompts = st.lists(st.integers(1, 48), min_size=1, max_size=40)
drafts = st.lists(st.lists(st.integers(0, 2 * VOCAB_SIZE), max_size=16), min_size=1, max_size=30)


class Scripted:
    """Implements Drafter with given drafts, one after the other. Those that are `helped` begin with
    the right tokens."""

    searches = True

    def __init__(self, drafts: Iterable[list[int]], helped: Iterable[bool] = (True, False)) -> None:
        self._drafts, self._is_helped = itertools.cycle(drafts), itertools.cycle(helped)

    def propose(self, sequence: Sequence, most: int) -> Draft | None:
        tokens = next(self._drafts)
        if next(self._is_helped):
            tokens = [*continuation(sequence.token_ids, len(tokens) // 2), *tokens]
        return Draft(tuple(tokens[:most]), DraftSource.NGRAM, 2) if tokens[:most] else None

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Does nothing."""


@pytest.mark.timeout(900)
@settings(max_examples=700 if EVERY_CASE else 40)  # 700: more than 10 000 steps
@given(
    st.lists(st.tuples(prompts, st.integers(1, 60)), min_size=1, max_size=6),
    drafts,
    st.lists(st.integers(0, 60), max_size=4),
    st.sampled_from([11, 20, 64]),
    st.booleans(),
)
def test_any_tokens_may_be_drafted(
    asked: list[tuple[list[int], int]],
    proposed: list[list[int]],
    aborts: list[int],
    num_pages: int,
    is_adaptive: bool,
) -> None:
    """Drafts include tokens that the model does not have; pages are few, and requests are
    aborted."""
    requests = [request(f"r{i}", prompt, max_tokens=most) for i, (prompt, most) in enumerate(asked)]
    expected = run(make_engine(FakeRunner()), requests)
    engine = make_engine(FakeRunner(), num_pages)
    give_drafts(engine, Scripted(proposed), most=16, is_adaptive=is_adaptive)
    for each in requests:
        engine.add(each)
    found = {each.request_id: Answer() for each in requests}
    for step in itertools.count():
        if not engine.has_work:
            break
        if step in aborts:
            engine.abort(f"r{step % len(requests)}")
        for delta in engine.step():
            note(found[delta.request_id], delta)
        engine.check_integrity()
    for name, answer in found.items():
        if answer.end is FinishReason.ABORT:
            assert answer.token_ids == expected[name].token_ids[: len(answer.token_ids)]
        else:
            assert answer == expected[name]
    load = engine.stats().load
    assert load.num_free_pages == load.num_pages


@pytest.mark.parametrize("num_prompt", [100, 143, 144, 150, 155, 157, 158, 159])
def test_a_context_that_becomes_full_within_a_draft(num_prompt: int) -> None:
    """The model takes 160 tokens: the answer's last token is the one that fills the context."""
    prompt = [1 + i % 40 for i in range(num_prompt)]
    engine, answer = make_engine(FakeRunner()), continuation(prompt, 80)
    give_drafts(engine, Oracle({"a": answer}, vocab_size=VOCAB_SIZE), most=7)
    found = run(engine, [request("a", prompt, max_tokens=None, ignore_eos=True)])["a"]
    assert found.token_ids == answer[: 160 - num_prompt]
    assert found.end is FinishReason.LENGTH


class CertainRunner(FakeRunner):
    """Gives the same logits in every row."""

    def __init__(self, logits_V: Tensor) -> None:
        super().__init__()
        self._logits_V = logits_V

    def run(self, plan: StepPlan) -> Tensor:
        for piece in plan.slices:
            self._write(piece.start, piece.token_ids.tolist(), piece.page_table)
        return self._logits_V.expand(sum(s.num_logits for s in plan.slices), -1).clone()


@pytest.mark.timeout(900)
def test_the_distribution_is_that_without_drafts() -> None:
    """A chi-square test of 5 600 tokens (201 600 if every case runs), of which many were drafted
    and refused. The tokens of a seed are equal, too."""
    logits_V = torch.full((VOCAB_SIZE,), -30.0)
    logits_V[1:9] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0])
    probs = torch.softmax(logits_V, 0)[1:9].tolist()
    counts = Counter[int]()

    def engine() -> Engine:
        return engine_of(LocalExecutor(CertainRunner(logits_V), Sampler(frozenset([EOS]))))

    for first in range(0, 1440 if EVERY_CASE else 40, 5):
        asked = [
            request(f"r{seed}", [1, 2], max_tokens=140, temperature=1.0, seed=seed, ignore_eos=True)
            for seed in range(first, first + 5)
        ]
        drafting = engine()
        give_drafts(drafting, Scripted([[1, 1, 2], [2, 1], [5], [1] * 9], [False]), most=9)
        answers = run(drafting, asked)
        for answer in answers.values():
            counts.update(answer.token_ids)
        if first % 20 == 0:
            assert answers == run(engine(), asked)
    total = sum(counts.values())
    expected = {token: p * total for token, p in enumerate(probs, 1)}
    chi_square = sum((counts[t] - n) ** 2 / n for t, n in expected.items())
    assert chi_square < 24.3, f"7 degrees of freedom: p is below 0.001 at {chi_square:.1f}"


def test_equal_runs_accept_equal_numbers() -> None:
    def accepted() -> object:
        engine = make_engine(FakeRunner(), 20)
        answers = {f"r{i}": continuation([3, i + 1], 50) for i in range(6)}
        oracle = Oracle(answers, 0.7, seed=4, lengths=(1, 9), vocab_size=VOCAB_SIZE)
        drafting = give_drafts(engine, oracle, most=9)
        run(engine, [request(f"r{i}", [3, i + 1], max_tokens=50) for i in range(6)])
        counts = drafting.counts
        return counts.by_source, counts.accepted_by_position

    assert accepted() == accepted()
