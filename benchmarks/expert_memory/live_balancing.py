"""Measures live balancing under load: step times before, during and after moves, and the balance.

    python benchmarks/run.py live_balancing --seconds 60 --interval 15 --json build/live.json
    python benchmarks/run.py live_balancing --plan rotate --seconds 60 --interval 8 --max-moves 32

The server starts with the worst placement for its first requests: the experts in the order of their
loads, with the hottest on rank 0. After half of the time the requests change to other prompts.
Every answer is compared with that of one process. The exit status is 0 only if no answer differs
and something moved.

With `--plan rotate` there is no search: all experts move to the next rank each time, and the
balance stays the same. Steps during a move and between moves therefore differ only in the move.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from expert_memory.rounds import draw, token_streams
from experts.placement.plan_file import write_placement
from experts.placement.problem.placement import Placement
from harness.environment import write_report
from moe_serve.cluster.rebalance.planner import PlanAnswer, PlanJob, plan_in_process
from moe_serve.cluster.rebalance.proposal import LoadWindow
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.routes.placement_control import PlacementControl
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.text.tokenizer import Tokenizer

_LOOK_S = 0.5  # between two looks at the balance

Answers = dict[int, tuple[int, ...]]  # by the question


@dataclass(frozen=True, slots=True)
class Step:
    """The times of one step, as its caller measured them."""

    at_s: float
    seconds: float
    phase: str  # the state of the balancing; before the first move, and after it
    num_tokens: int


@dataclass(slots=True)
class Run:
    """The results of a run."""

    steps: list[Step] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    num_wrong: int = 0
    num_failed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    questions = _questions(options)
    answers, counts_LE, layers = _alone(questions, options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "worst.json"
        write_placement(_worst(counts_LE, layers, options.expert_ranks), path)
        plan = plan_in_process if options.plan == "search" else _rotated
        built = build_cluster(_config(options, str(path)), plan=plan)
        assert built.placement is not None, "ranks were asked for"
        try:
            run = _drive(built.engine, built.placement, questions, answers, options)
            status = built.placement.status()
        finally:
            built.engine.close()
    report = _report(run, options) | {"status": asdict(status)}
    print(json.dumps({k: v for k, v in report.items() if k != "looks"}, indent=1))
    write_report(options.json, report)
    is_well = not run.num_wrong and not run.num_failed and status.num_plans["moved"] > 0
    return 0 if is_well else 1


def _questions(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Returns the prompts: the first half comes from one half of the texts, the rest from the
    other.
    """
    streams = token_streams(options.texts, Tokenizer.load(demo_model_folder()))
    middle, count = len(streams) // 2, options.questions
    halves = (streams[:middle], streams[middle:])
    return [piece for half in halves for piece in draw(half, count, options.prompt, options.seed)]


def _request(number: int, prompt: Sequence[int], num_tokens: int) -> GenerationRequest:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=f"{number}", prompt_token_ids=tuple(prompt), params=params)


def _alone(
    questions: list[tuple[int, ...]], options: argparse.Namespace
) -> tuple[Answers, np.ndarray, list[int]]:
    """Returns the answers of one process, and the experts that its first half of the prompts
    chose.
    """
    built = build_engine(_config(options, None))
    layers = [i for i, layer in enumerate(built.spec.layers) if layer.is_sparse]
    window = LoadWindow(len(layers), built.spec.router.num_experts)
    built.routes.add(window)
    answers: Answers = {}
    for half in (questions[: options.questions], questions[options.questions :]):
        first, found = len(answers), dict[int, list[int]]()
        for index, prompt in enumerate(half):
            found[first + index] = []
            built.engine.add(_request(first + index, prompt, options.tokens))
        while built.engine.has_work:
            for delta in built.engine.step():
                found[int(delta.request_id)] += delta.token_ids
        answers |= {index: tuple(tokens) for index, tokens in found.items()}
        built.routes.remove(window)  # the placement does not know the other half
    return answers, window.look().counts_LE, layers


def _worst(counts_LE: np.ndarray, layers: list[int], num_ranks: int) -> Placement:
    """Returns a placement with consecutive experts in the order of their loads on each rank."""
    num_experts = counts_LE.shape[1]
    ranks_of = {}
    for layer, counts_E in zip(layers, counts_LE, strict=True):
        place_E = np.empty(num_experts, dtype=int)
        place_E[np.argsort(-counts_E)] = np.arange(num_experts)
        ranks_of[layer] = tuple((int(p) * num_ranks // num_experts,) for p in place_E)
    return Placement(num_ranks=num_ranks, num_experts=num_experts, ranks_of=ranks_of)


def _rotated(job: PlanJob) -> PlanAnswer:
    """Returns the placement with every expert moved to the next rank."""
    num_ranks = len(job.slots)
    ranks_of = [[[(r + 1) % num_ranks for r in each] for each in layer] for layer in job.ranks_of]
    return PlanAnswer(ranks_of=ranks_of, solver="rotate")


def _drive(
    engine: DrivenEngine,
    control: PlacementControl,
    questions: list[tuple[int, ...]],
    answers: Answers,
    options: argparse.Namespace,
) -> Run:
    """Runs `clients` streams; each sends its next prompt when it has its answer."""
    run, numbers, start, first = Run(), itertools.count(), time.perf_counter(), control.plan()
    open_: dict[int, tuple[int, list[int]]] = {}  # request -> question, tokens
    next_look, next_plan, before = 0.0, options.interval, start
    while (now := time.perf_counter() - start) < options.seconds or open_:
        half = options.questions if now > options.seconds / 2 else 0
        while len(open_) < options.clients and now < options.seconds:
            number = next(numbers)
            question = half + number % options.questions
            open_[number] = (question, [])
            engine.add(_request(number, questions[question], options.tokens))
        deltas = engine.step()
        ended = time.perf_counter()
        phase: str = control.state
        if phase == "idle":
            phase = "idle, before" if control.plan() is first else "idle, after"
        num_tokens = sum(len(delta.token_ids) for delta in deltas)
        run.steps.append(Step(now, ended - before, phase, num_tokens))
        before = time.perf_counter()
        for delta in deltas:
            question, tokens = open_[int(delta.request_id)]
            tokens += delta.token_ids
            if delta.finish_reason is not None:
                del open_[int(delta.request_id)]
                run.num_answers += 1
                run.num_failed += delta.error is not None
                run.num_wrong += tuple(tokens) != answers[question]
        if options.plan == "rotate" and now >= next_plan and control.state == "idle":
            next_plan = now + options.interval
            control.rebalance()
        if now >= next_look:
            run.looks.append({"at_s": now} | asdict(control.status()))
            next_look = now + _LOOK_S
            before = time.perf_counter()
    return run


def _report(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    phases = {}
    for phase in sorted({step.phase for step in run.steps}):
        steps = [step for step in run.steps if step.phase == phase]
        seconds = np.array([step.seconds for step in steps])
        phases[phase] = {
            "num_steps": len(steps),
            "seconds": round(float(seconds.sum()), 3),
            "p50_ms": round(1e3 * float(np.percentile(seconds, 50)), 3),
            "p99_ms": round(1e3 * float(np.percentile(seconds, 99)), 3),
            "max_ms": round(1e3 * float(seconds.max()), 3),
            "tokens_per_s": round(sum(s.num_tokens for s in steps) / float(seconds.sum()), 1),
        }
    shown = {name: str(value) for name, value in vars(options).items()}
    return {
        "options": shown,
        "phases": phases,
        "p99_over_idle": _over_idle(run.steps),
        "num_answers": run.num_answers,
        "num_wrong": run.num_wrong,
        "num_failed": run.num_failed,
        "looks": run.looks,
    }


def _over_idle(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the ratio of 99th percentiles: steps during plans or copies over all other steps.

    The result has a 95% bootstrap interval.
    """
    rng, found = np.random.default_rng(0), dict[str, Any]()
    idle = np.array([step.seconds for step in steps if step.phase.startswith("idle")])
    for phase in ("planning", "copying"):
        seconds = np.array([step.seconds for step in steps if step.phase == phase])
        if not len(seconds):
            continue
        draws = [
            np.percentile(rng.choice(seconds, len(seconds)), 99)
            / np.percentile(rng.choice(idle, len(idle)), 99)
            for _ in range(1000)
        ]
        found[phase] = {
            "ratio": round(float(np.percentile(seconds, 99) / np.percentile(idle, 99)), 3),
            "interval": [round(float(np.percentile(draws, q)), 3) for q in (2.5, 97.5)],
        }
    return found


def _config(options: argparse.Namespace, placement: str | None) -> EngineConfig:
    """Returns the configuration of a server; without a placement it is one process."""
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(num_threads=1),
        cache=CacheConfig(num_pages=2048),
        scheduler=SchedulerConfig(max_num_seqs=options.clients),
        pipeline=PipelineConfig(micro_batches=options.micro_batches),
    )
    if placement is None:
        return config
    cluster = ClusterConfig(
        attention_ranks=options.attention_ranks,
        expert_ranks=options.expert_ranks,
        placement=placement,
        rebalance="auto" if options.plan == "search" else "manual",
        rebalance_min_gain=0.05 if options.plan == "search" else 0.0,
        rebalance_interval_s=options.interval,
        rebalance_objective=options.objective,
        rebalance_max_moves=options.max_moves,
        rebalance_bytes_per_s=options.bytes_per_s,
        rebalance_spare_slots=options.spare_slots,
    )
    return replace(config, cluster=cluster)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between two plans")
    parser.add_argument("--plan", choices=("search", "rotate"), default="search")
    parser.add_argument("--objective", choices=("tokens", "activated", "auto"), default="tokens")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--questions", type=int, default=32, help="of each half")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--attention-ranks", type=int, default=1)
    parser.add_argument("--expert-ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--max-moves", type=int, default=8)
    parser.add_argument("--spare-slots", type=int, default=0)
    parser.add_argument("--bytes-per-s", type=int, default=64 * 2**20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", nargs="*", type=Path, default=[], help="at least 2 files")
    parser.add_argument("--json", type=Path)
    return parser
