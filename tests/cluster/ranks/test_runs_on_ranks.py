"""Runs of several tokens between an engine and a rank: messages, mirrors and shards stay in step.

The rank is the real one without its process: orders and reports are encoded and decoded.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from moe_serve.cluster.control.messages import (
    QueryPages,
    RunStep,
    StageSeconds,
    StepDone,
    StepFailed,
)
from moe_serve.cluster.ranks.attention_shard import ShardStep, pack_order, unpack_order
from moe_serve.cluster.ranks.mirror import Mirrors, tokens_of
from moe_serve.cluster.steps.coordinator import Coordinator
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.cluster.steps.step_in_flight import RankWork
from moe_serve.config.sections import SchedulerConfig
from moe_serve.engine.drafting.oracle import Oracle
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor, StepExecutor
from moe_serve.engine.execute.step_outcome import RowFailure, StepOutcome
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.sampling.sampler import Sampled, Sampler
from tests.support.engine.fake_runner import FakeRunner
from tests.support.engine.oracle import give_drafts
from tests.support.engine.runs import RunEngine, RunExecutor
from tests.support.sampled_cases import EVERY_CASE

NAME, EOS = "attention-0", frozenset([7])
SEEDS = range(12 if EVERY_CASE else 6)


class FakeRank:
    """Takes the place of the coordinator, the connection and the process of one attention rank with
    two shards."""

    def __init__(self, most: int = 0, seed: int = 0) -> None:
        """Its steps give runs of at most `most` tokens without drafts; 0: as drafts allow."""
        self.runner, self.epoch = FakeRunner(), SimpleNamespace(starts={NAME: 1})
        plain = LocalExecutor(self.runner, Sampler(EOS))
        self.executor = RunExecutor(plain, most, seed) if most else plain
        self.leader, self.follower = Mirrors(), Mirrors()
        self._tokens: Mapping[int, list[int]] = {}
        self._num_steps = 0

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        self._num_steps += 1
        work = works[NAME]
        sent = RunStep(
            epoch=1,
            step=self._num_steps,
            rows=[],
            micro_batches=work.micro_batches,
            opened=work.opened,
            closed=work.closed,
            page_work=work.page_work,
        )
        order = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=RunStep)
        plan = self.leader.update(order)
        self._follow(order)
        self._do(order.page_work)
        outcome = self.executor.run(plan, self.leader.sequences)
        self._tokens = tokens_of(outcome)
        self.leader.append(self._tokens)
        done = StepDone(
            epoch=1,
            step=self._num_steps,
            sampled=outcome.sampled,
            failures=outcome.failures,
            prompt_logprobs=outcome.prompt_logprobs,
            seconds=StageSeconds(),
            spoiled=tuple(outcome.spoiled),
            proposals=outcome.proposals,
        )
        decoder = msgspec.msgpack.Decoder(StepDone | StepFailed)
        return {NAME: decoder.decode(msgspec.msgpack.encode(done))}

    def _follow(self, order: RunStep) -> None:
        """The other shard gets the tokens with the next step, and then has the leader's state."""
        step = unpack_order(pack_order(ShardStep(tokens=self._tokens, run=order)))
        assert isinstance(step, ShardStep)
        self.follower.append(step.tokens)
        self.follower.update(step.run)
        for key, sequence in self.leader.sequences.items():
            other = self.follower.sequences[key]
            assert other.token_ids == sequence.token_ids
            assert other.page_table == sequence.page_table

    def _do(self, page_work: Any) -> None:
        for work in page_work:
            self.runner.clear_pages(list(work.clear))
            self.runner.copy_pages([(source, target) for source, target in work.copy])

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        self._do(order.page_work)
        return self.runner.finite_pages(list(order.pages))


def run(
    executor: StepExecutor,
    num_pages: int,
    requests: list[GenerationRequest],
    kind: Any,
    oracle: Oracle | None = None,
) -> Any:
    engine: Engine = kind(
        executor,
        scheduler=SchedulerConfig(max_num_seqs=5, max_batched_tokens=48),
        num_pages=num_pages,
        micro_batches=2,
        max_model_len=160,
        eos_token_ids=EOS,
    )
    if oracle is not None:
        give_drafts(engine, oracle, most=16)
    for one in requests:
        engine.add(one)
    answers: dict[str, list[Any]] = {one.request_id: [[], [], None, None] for one in requests}
    while engine.has_work:
        for delta in engine.step():
            answer = answers[delta.request_id]
            answer[0] += delta.token_ids
            answer[1] += delta.logprobs or ()
            answer[2] = answer[2] or delta.prompt_logprobs
            answer[3] = (delta.finish_reason, delta.stop_token_id, delta.error)
        engine.check_integrity()
    stats = engine.stats()
    assert stats.load.num_free_pages == stats.load.num_pages, "all pages are free when nothing runs"
    return answers


def crowd(rng: random.Random) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(rng.randrange(1, 48) for _ in range(rng.choice([1, 9, 33, 60]))),
            params=SamplingParams(
                temperature=rng.choice([0.0, 1.2]),
                seed=i,
                max_tokens=rng.choice([1, 3, 20, 60]),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, 1]),
                prompt_logprobs=rng.choice([None, 1]),
                repetition_penalty=rng.choice([1.0, 1.3]),
            ),
        )
        for i in range(8)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_drafts_on_a_rank(seed: int, alpha: float) -> None:
    """They travel with the step, and only tokens that were sampled stay on the rank."""
    rng = random.Random(seed)
    num_pages, requests = rng.choice([10, 14, 64]), crowd(rng)
    expected = run(LocalExecutor(FakeRunner(), Sampler(EOS)), num_pages, requests, Engine)
    answers = {name: list(answer[0]) for name, answer in expected.items()}
    rank = FakeRank()
    remote = RemoteExecutor(cast(Coordinator, rank), NAME)
    oracle = Oracle(answers, alpha, seed=seed, lengths=(1, 16), vocab_size=50)
    assert run(remote, num_pages, requests, Engine, oracle) == expected
    assert any(piece.num_drafted for plan in rank.runner.plans for piece in plan.slices)


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_of_a_rank_that_gives_runs(seed: int) -> None:
    """Also with preemptions, when a sequence is opened again with the tokens that it has."""
    rng = random.Random(seed)
    num_pages, requests = rng.choice([10, 14, 64]), crowd(rng)
    expected = run(LocalExecutor(FakeRunner(), Sampler(EOS)), num_pages, requests, Engine)
    rank = FakeRank(4, seed)
    remote = RemoteExecutor(cast(Coordinator, rank), NAME)
    assert run(remote, num_pages, requests, RunEngine) == expected
    assert isinstance(rank.executor, RunExecutor) and max(rank.executor.lengths) > 1


def test_tokens_that_mirrors_append() -> None:
    valid, invalid = Sampled(5, True, None), Sampled(9, False, None)
    failures = {2: RowFailure("no"), 3: RowFailure("no")}
    outcome = StepOutcome(sampled={1: (valid, invalid), 2: (valid, valid)}, failures=failures)
    assert tokens_of(outcome) == {1: [5, 0], 2: [5, 5, 0], 3: [0]}
