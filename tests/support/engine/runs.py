"""Makes an engine's steps give runs of several tokens, as right drafts of an oracle would.

A step of such an engine computes several steps of its executor. The answers must be those of single
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.execute.step_outcome import StepOutcome
from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.sampling.sampler import Sampled
from moe_serve.model.step_plan import MicroBatch, RouteAsk, SequenceSlice, StepPlan
from moe_serve.pipeline.route_tap import StepChoices
from tests.support.engine.fake_runner import PAGE_SIZE


class RunExecutor(LocalExecutor):
    """Runs the steps of another executor, each of which gives runs of 1 to `most` tokens. It does
    not change the sequences, and does not know where they end."""

    def __init__(self, inner: LocalExecutor, most: int, seed: int = 0) -> None:
        super().__init__(inner.runner, inner._sampler, inner._tap, inner._memory, inner._masks)
        self._most, self._rng = most, random.Random(seed)
        self.lengths: list[int] = []  # of all runs

    def run(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> StepOutcome:
        outcome = super().run(plan, sequences)
        runs = {key: list(run) for key, run in outcome.sampled.items()}
        wanted = {key: self._rng.randint(1, self._most) for key in runs}
        failures, parts = dict(outcome.failures), [outcome.choices]
        begins = {key: sequences[key].num_tokens for key in runs}
        try:
            while active := [k for k in runs if self._goes_on(sequences[k], runs[k], wanted[k])]:
                for key in active:
                    sequences[key].append(runs[key][-1].token_id)
                further = super().run(_plan_of(active, sequences, plan.routes), sequences)
                parts.append(further.choices)
                for key in active:
                    if key in further.failures:
                        failures[key], wanted[key] = further.failures[key], 0
                    else:
                        runs[key] += further.sampled[key]
        finally:
            for key, begin in begins.items():
                sequences[key].truncate(begin)
        self.lengths += [len(run) for run in runs.values()]
        return replace(
            outcome,
            sampled={key: tuple(run) for key, run in runs.items()},
            failures=failures,
            choices=_joined(parts),
        )

    def _goes_on(self, sequence: Sequence, run: list[Sampled], wanted: int) -> bool:
        has_page = len(sequence.page_table) * PAGE_SIZE > sequence.num_tokens
        return len(run) < wanted and run[-1].is_valid and has_page


class RunEngine(Engine):
    """Gives sequences spare pages for their runs and takes the unused ones back."""

    most = 4

    def make_plan(self, micro_batches: int | None = None, number: int | None = None) -> StepPlan:
        cache = self._scheduler.cache
        for sequence, count in self._schedule.values():
            end = sequence.num_computed_tokens + count + self.most
            if 0 < (missing := sequence.num_missing_pages(end)) <= cache.num_available:
                sequence.page_table += cache.allocate(missing)
        return super().make_plan(micro_batches, number)

    def end_step(self, outcome: StepOutcome | Exception | None) -> list[TokenDelta]:
        deltas = super().end_step(outcome)
        for sequence in self._scheduler.running:
            self._scheduler.truncate(sequence, sequence.num_computed_tokens)
        return deltas


def give_runs(engine: object, most: int = 4, seed: int = 0) -> RunExecutor:
    """Makes an engine's steps give runs of 1 to `most` tokens."""
    assert isinstance(engine, Engine) and isinstance(engine._executor, LocalExecutor), f"{engine}"
    engine.__class__ = RunEngine
    engine._executor = executor = RunExecutor(engine._executor, most, seed)
    return executor


def _plan_of(
    active: list[int], sequences: Mapping[int, Sequence], routes: RouteAsk | None
) -> StepPlan:
    slices = [
        SequenceSlice(
            key,
            sequences[key].num_tokens - 1,
            np.array(sequences[key].token_ids[-1:], dtype=np.int64),
            tuple(sequences[key].page_table),
            num_logits=1,
        )
        for key in active
    ]
    return StepPlan((MicroBatch(tuple(slices)),), routes)


def _joined(parts: list[StepChoices | None]) -> StepChoices | None:
    """Joins the choices of all parts, one sequence after the other."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    ids: dict[int, list[NDArray[np.integer[Any]]]] = {}
    weights: dict[int, list[NDArray[np.float16]]] = {}
    for part in known:
        end = 0
        for key, count in zip(part.sequence_ids, part.counts, strict=True):
            begin, end = end, end + count
            ids.setdefault(key, []).append(part.expert_ids_NLK[begin:end])
            if part.weights_NLK is not None:
                weights.setdefault(key, []).append(part.weights_NLK[begin:end])
    return StepChoices(
        tuple(ids),
        tuple(sum(map(len, each)) for each in ids.values()),
        np.concatenate([part for each in ids.values() for part in each]),
        np.concatenate([part for each in weights.values() for part in each]) if weights else None,
    )
