"""Runs the same requests with and without drafts, in turns, and compares times and tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moe_serve.clock import REAL_CLOCK, Clock
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.drafting.drafting import Drafting
from moe_serve.engine.drafting.drafting_maker import drafting_maker
from moe_serve.engine.engine import Engine
from moe_serve.engine.execute.step_executor import LocalExecutor
from moe_serve.engine.request.draft_counts import SourceCounts
from moe_serve.engine.request.request import GenerationRequest, TokenDelta
from moe_serve.model.load.weight_reader import OpenWeights, open_checkpoint
from moe_serve.model.step_plan import StepPlan

MakeRequests = Callable[[int], list[GenerationRequest]]  # of a round
MakeDrafting = Callable[[], Drafting | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The decode steps of one run. Steps in which a prompt was read are left out."""

    seconds: float
    cpu_s: float  # of this process
    tokens: int
    steps: int
    rows: int
    drafts: SourceCounts
    drafter_s: float
    forward_s: float  # of the model alone: without scheduling, sampling and drafting
    answers: dict[str, list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Turns with drafts over turns without, medians over the rounds."""

    name: str
    speedup: float  # wall clock
    cpu_speedup: float  # processor time, for a machine that others use
    low: float
    high: float
    tokens_per_step: float  # of one sequence
    acceptance: float  # accepted / drafted
    rows_per_step: float
    step_ratio: float  # time of a step with drafts / without: v(n)
    drafter_us: float  # per sequence and step
    forward_ratio: float  # v(n) of the model alone

    @property
    def efficiency(self) -> float:
        """The gain over what it would be if a step were the model alone."""
        return self.speedup * self.forward_ratio / self.tokens_per_step


class Bench:
    """An engine on one model. `num_threads` is that of the native kernels."""

    def __init__(
        self,
        model: str | None,
        num_threads: int,
        method: SpeculationMethod = "auto",
        max_num_seqs: int = 64,
        max_tokens: int = 16,
        *,
        self_experts: int = 2,
        expert_memory_bytes: int | None = None,
        open_weights: OpenWeights = open_checkpoint,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`self_experts` are those of a token while the model drafts for itself. `clock` is the
        controller's clock."""
        self.config = EngineConfig(
            model=ModelConfig(
                path=model,
                num_threads=num_threads,
                max_model_len=1024,
                expert_memory_bytes=expert_memory_bytes,
            ),
            cache=CacheConfig(num_pages=64 * max_num_seqs),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
            speculation=SpeculationConfig(
                method=method, max_tokens=max_tokens, self_experts=self_experts
            ),
        )
        self.built = build_engine(self.config, open_weights=open_weights)
        assert isinstance(self.built.engine, Engine), "the model is in this process"
        self.engine = self.built.engine
        executor = self.engine._executor
        assert isinstance(executor, LocalExecutor), "steps run in this process"
        self._executor, self.step_drafter = executor, executor.drafter
        self.clock = clock
        if self.step_drafter is not None:
            self.step_drafter.clock = clock
        self._forward_s, run = 0.0, executor.runner.run

        def timed(plan: StepPlan) -> Tensor:
            clock = time.perf_counter()
            logits = run(plan)
            self._forward_s += time.perf_counter() - clock
            return logits

        executor.runner.run = timed  # type: ignore[method-assign]

    def drafting(self, **changes: object) -> Drafting | None:
        """Returns a fresh drafting with changed settings."""
        section = replace(self.config.speculation, **changes)  # type: ignore[arg-type]
        stop, vocab_size = self.engine.stop_rule, self.built.layout.vocab_size
        return drafting_maker(section, vocab_size, stop, self.clock)()

    def turn(self, requests: Sequence[GenerationRequest], drafting: Drafting | None) -> Turn:
        """Runs the requests to their ends."""
        engine, answers = self.engine, {r.request_id: list[int]() for r in requests}
        engine.drafts.use(drafting, self.clock)
        self._executor.drafter = None if drafting is None else self.step_drafter
        before = engine.stats().counts.drafts
        for request in requests:
            engine.add(request)
        while any(not answer for answer in answers.values()):
            _note(answers, engine.step())
        num_tokens, num_steps = sum(map(len, answers.values())), engine.stats().num_steps
        self._forward_s = 0.0
        sequence_steps, cpu, clock = 0, time.process_time(), time.perf_counter()
        while engine.has_work:
            deltas = engine.step()
            sequence_steps += len(deltas)
            _note(answers, deltas)
        seconds, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
        counts = engine.stats().counts.drafts
        drafts = SourceCounts(
            num_drafts=counts.total.num_drafts - before.total.num_drafts,
            num_drafted=counts.total.num_drafted - before.total.num_drafted,
            num_accepted=counts.total.num_accepted - before.total.num_accepted,
        )
        return Turn(
            seconds=seconds,
            cpu_s=cpu_s,
            tokens=sum(map(len, answers.values())) - num_tokens,
            steps=engine.stats().num_steps - num_steps,
            rows=sequence_steps + drafts.num_drafted,
            drafts=drafts,
            drafter_s=counts.drafter_s - before.drafter_s,
            forward_s=self._forward_s,
            answers=answers,
        )

    def experts_of(self, requests: Sequence[GenerationRequest]) -> dict[int, float]:
        """Returns by n how many different experts of a layer n consecutive tokens of an answer
        chose, on average."""
        self.engine.drafts.use(None)
        rows: dict[str, list[list[list[int]]]] = {r.request_id: [] for r in requests}
        for request in requests:
            self.engine.add(replace(request, wants_routed_experts=True))
        while self.engine.has_work:
            for delta in self.engine.step():
                rows[delta.request_id] += [each.lists() for each in delta.routed_experts or ()]
        found = {}
        for count in (1, 2, 3, 4, 6, 8, 16):
            windows = [
                [each[layer] for each in answer[start : start + count]]
                for answer in rows.values()
                for start in range(len(answer) - count + 1)
                for layer in range(len(answer[0]))
            ]
            found[count] = statistics.mean(len(set().union(*window)) for window in windows)
        return found

    def compare(
        self, name: str, requests: MakeRequests, drafting: MakeDrafting, rounds: int
    ) -> Comparison:
        """Alternate turns without and with drafts. Raises AssertionError if a token differs."""
        off, on = list[Turn](), list[Turn]()
        for number in range(rounds):
            asked, made = requests(number), drafting()
            for is_on in (False, True) if number % 2 else (True, False):
                (on if is_on else off).append(self.turn(asked, made if is_on else None))
            assert on[-1].answers == off[-1].answers, f"{name}: drafts changed a token"
        return comparison(name, off, on)


def _note(answers: dict[str, list[int]], deltas: Sequence[TokenDelta]) -> None:
    for delta in deltas:
        assert delta.error is None, f"{delta.request_id}: {delta.error}"
        answers[delta.request_id] += delta.token_ids


def comparison(name: str, off: Sequence[Turn], on: Sequence[Turn]) -> Comparison:
    """Compares turns with drafts to turns without, in pairs."""
    ratios = sorted(b.tokens_per_s / a.tokens_per_s for a, b in zip(off, on, strict=True))
    cpu = [a.cpu_s / b.cpu_s for a, b in zip(off, on, strict=True)]
    drafted = sum(turn.drafts.num_drafted for turn in on)
    rows = sum(turn.rows - turn.drafts.num_drafted for turn in on)
    step_s = [sum(t.cpu_s for t in turns) / sum(t.steps for t in turns) for turns in (off, on)]
    forward_s = [statistics.median(t.forward_s / max(1, t.steps) for t in ts) for ts in (off, on)]
    return Comparison(
        name=name,
        speedup=statistics.median(ratios),
        cpu_speedup=statistics.median(cpu),
        low=ratios[0],
        high=ratios[-1],
        tokens_per_step=sum(turn.tokens for turn in on) / max(1, rows),
        acceptance=sum(turn.drafts.num_accepted for turn in on) / max(1, drafted),
        rows_per_step=sum(turn.rows for turn in on) / max(1, sum(turn.steps for turn in on)),
        step_ratio=step_s[1] / step_s[0],
        drafter_us=1e6 * sum(turn.drafter_s for turn in on) / max(1, rows),
        forward_ratio=forward_s[1] / forward_s[0],
    )


def line(of: Comparison) -> str:
    """Returns a comparison as a line of a table."""
    return (
        f"{of.name:36} {of.speedup:5.2f}x ({of.low:.2f} to {of.high:.2f}) {of.cpu_speedup:6.2f}x"
        f" {of.tokens_per_step:7.2f} {of.acceptance:8.1%} {of.rows_per_step:8.1f}"
        f" {of.step_ratio:6.2f} {of.drafter_us:8.1f}"
    )
