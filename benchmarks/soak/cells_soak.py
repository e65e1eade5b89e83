"""Kills ranks of cells at random while requests move between them, and checks every answer.

    python benchmarks/run.py cells_soak --minutes 5 --seed 1
    python benchmarks/run.py cells_soak --layout "1x(1A1E prefill) 2x(1A1E decode)"

Clients come and leave, cells are drained and undrained, and processes get SIGKILL. Every answer is
compared with that of one process, and at the end no page may be held. The exit status is 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from harness.environment import write_report
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.started_cells import build_cells
from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import FinishReason, GenerationRequest, TokenDelta
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.errors import CellsError

_MOST_OPEN = 12
_LONGEST_S = 120.0  # for what is open at the end
_ABORT, _DRAIN = 0.02, 0.01  # shares of steps


@dataclass(slots=True)
class Answer:
    """The tokens and log probabilities of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    end: FinishReason | None = None

    def take(self, delta: TokenDelta) -> None:
        assert self.end is None, f"{delta.request_id} goes on after its end"
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.end = delta.finish_reason


def questions(count: int) -> list[GenerationRequest]:
    """Prompts of 1 to 200 tokens; every other answer is sampled with a seed."""
    rng = np.random.default_rng(5)
    return [
        GenerationRequest(
            request_id=f"question-{index}",
            prompt_token_ids=tuple(rng.integers(5, 4000, int(rng.integers(1, 200))).tolist()),
            params=SamplingParams(
                max_tokens=40, temperature=float(index % 2), seed=index, ignore_eos=True, logprobs=1
            ),
        )
        for index in range(count)
    ]


def answered(engine: DrivenEngine, asked: list[GenerationRequest]) -> dict[str, Answer]:
    answers = {each.request_id: Answer() for each in asked}
    for each in asked:
        engine.add(each)
    while any(answer.end is None for answer in answers.values()):
        for delta in engine.step():
            answers[delta.request_id].take(delta)
    return answers


class Soak:
    """One run. `step` serves, and hurts by chance."""

    def __init__(
        self,
        engine: CellsEngine,
        asked: list[GenerationRequest],
        expected: Mapping[str, Answer],
        rng: random.Random,
    ) -> None:
        self.engine, self._asked, self._expected, self._rng = engine, asked, expected, rng
        self.open: dict[str, tuple[str, Answer]] = {}
        self.counts = dict.fromkeys(("answers", "wrong", "failed", "aborted", "kills", "drains"), 0)

    def ask(self) -> None:
        each = self._rng.choice(self._asked)
        name = f"{self.counts['answers']}-{len(self.open)}-{time.monotonic_ns()}"
        salt = self._rng.choice(["", name])
        self.engine.add(replace(each, request_id=name, cache_salt=salt))
        self.open[name] = each.request_id, Answer()

    def step(self) -> None:
        for delta in self.engine.step():
            question, answer = self.open[delta.request_id]
            answer.take(delta)
            if answer.end is None:
                continue
            del self.open[delta.request_id]
            if answer.end is FinishReason.ABORT:
                self.counts["aborted"] += 1
                continue
            self.counts["answers"] += 1
            self.counts["failed"] += answer.end is FinishReason.ERROR
            self.counts["wrong"] += answer != self._expected[question]

    def disturb(self) -> None:
        """Lets a client leave, or drains or undrains a cell, by chance."""
        draw = self._rng.random()
        if draw < _ABORT and self.open:
            self.engine.abort(self._rng.choice(list(self.open)))
        elif draw < _ABORT + _DRAIN:
            cell = self._rng.choice(self.engine.cells)
            try:
                self.engine.drain(cell.index, is_draining=not cell.is_draining)
                self.counts["drains"] += 1
            except CellsError:
                return

    def kill(self) -> None:
        """Kills a rank that is there."""
        cell = self._rng.choice(self.engine.cells)
        states = cell.engine._coordinator.membership.roster.serving()
        hellos = [s.link.hello for s in states if s.link is not None and s.link.hello is not None]
        if hellos:
            os.kill(self._rng.choice(hellos).pid, signal.SIGKILL)
            self.counts["kills"] += 1

    def finish(self) -> None:
        """Serves what is open, and checks that nothing is held."""
        for cell in self.engine.cells:
            self.engine.drain(cell.index, is_draining=False)
        end = time.monotonic() + _LONGEST_S
        while self.open or self.engine.has_work:
            assert time.monotonic() < end, f"hangs: {list(self.open)}"
            self.step()
        self.engine.check_integrity()
        load = self.engine.stats().load
        assert load.num_free_pages == load.num_pages, "a page has leaked"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="1x(1A1E prefill) 1x(1A1E decode)")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    alone = EngineConfig(
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(num_pages=512),
        scheduler=SchedulerConfig(max_num_seqs=8, max_batched_tokens=64),
    )
    asked = questions(24)
    expected = answered(build_engine(alone).engine, asked)
    cells = CellsConfig(layout=options.layout, hand_over="always", min_tokens=32)
    engine = build_cells(replace(alone, cells=cells)).engine
    assert isinstance(engine, CellsEngine), "several cells"
    try:
        soak = Soak(engine, asked, expected, random.Random(options.seed))
        end, next_kill = time.monotonic() + 60 * options.minutes, time.monotonic() + options.every
        while time.monotonic() < end:
            while len(soak.open) < _MOST_OPEN:
                soak.ask()
            if time.monotonic() >= next_kill:
                next_kill += options.every
                soak.kill()
            soak.disturb()
            soak.step()
        soak.finish()
        moves = engine.stats().moves
    finally:
        engine.close()
    assert moves is not None, "there are several cells"
    ended = {f"{kind} {result}": count for (kind, result), count in moves.ended.items()}
    print(", ".join(f"{name} {count}" for name, count in soak.counts.items()))
    print(", ".join(f"{name} {count}" for name, count in ended.items()))
    print(f"{moves.num_recomputed_tokens} tokens were computed again")
    write_report(options.json, {**soak.counts, "moves": ended})
    return 1 if soak.counts["wrong"] or soak.counts["failed"] else 0
