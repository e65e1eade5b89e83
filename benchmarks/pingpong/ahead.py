"""Measures the gain of sending steps one ahead on one attention rank and one expert rank.

    python benchmarks/run.py ahead --json build/ahead.json

Two clusters are loaded and take turns at runs of decode steps; the waiting one sleeps. Milliseconds
per step, and ratios of neighbouring runs, are medians. Tokens are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.environment import write_report
from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams

PROMPT, WARM = 16, 20  # tokens
Tokens = dict[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Milliseconds per step, and `ratio`: steps per second with a step ahead over without, for
    each run.
    """

    num_micro_batches: int
    num_sequences: int
    without_ms: float
    ahead_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float

    def __str__(self) -> str:
        spread = f"{self.ratio:.2f} [{self.ratio_low:.2f}, {self.ratio_high:.2f}]"
        times = f"{self.without_ms:8.2f} {self.ahead_ms:8.2f}"
        return f"{self.num_micro_batches:3} {self.num_sequences:10} {times}   {spread}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    rows = []
    print("  m  sequences  without    ahead   steps/s, ahead over without [least, most]")
    for num_micro_batches in options.micro_batches:
        with _loaded(options, num_micro_batches) as engines:
            for num_sequences in options.sequences:
                rows.append(_measured(engines, options, num_micro_batches, num_sequences))
                print(rows[-1], flush=True)
    write_report(options.json, {"rows": [asdict(row) for row in rows]})
    return 0


@contextmanager
def _loaded(options: argparse.Namespace, num_micro_batches: int) -> Iterator[list[DrivenEngine]]:
    """Yields two clusters: without and with steps ahead."""
    engines: list[DrivenEngine] = []
    try:
        for is_ahead in (False, True):
            engines.append(build_any_engine(_config(options, num_micro_batches, is_ahead)).engine)
        yield engines
    finally:
        for engine in engines:
            engine.close()


def _config(options: argparse.Namespace, num_micro_batches: int, is_ahead: bool) -> EngineConfig:
    most = max(options.sequences)
    context = PROMPT + _num_tokens(options)
    pages = most * (-(-context // 16) + 1) + 1
    return EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(path=options.model, num_threads=1, max_model_len=context),
        cache=CacheConfig(num_pages=pages, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=most, max_batched_tokens=PROMPT * most, max_queued_requests=most
        ),
        pipeline=PipelineConfig(micro_batches=num_micro_batches, ahead=is_ahead),
        cluster=ClusterConfig(attention_ranks=1, expert_ranks=1),
    )


def _measured(
    engines: Sequence[DrivenEngine],
    options: argparse.Namespace,
    num_micro_batches: int,
    num_sequences: int,
) -> Row:
    told: list[Tokens] = [{}, {}]
    for engine, tokens in zip(engines, told, strict=True):
        _add(engine, num_sequences, _num_tokens(options))
        _take(engine, WARM, tokens)
    runs: list[list[float]] = [[], []]
    for turn in range(options.runs):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            clock = time.perf_counter()
            _take(engines[place], options.steps, told[place])
            runs[place].append(1e3 * (time.perf_counter() - clock) / options.steps)
    for engine, tokens in zip(engines, told, strict=True):
        while engine.num_running:
            _take(engine, 1, tokens)
    assert told[0] == told[1], "steps ahead have changed a token"
    ratios = [without / ahead for without, ahead in zip(*runs, strict=True)]
    return Row(
        num_micro_batches=num_micro_batches,
        num_sequences=num_sequences,
        without_ms=statistics.median(runs[0]),
        ahead_ms=statistics.median(runs[1]),
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
    )


def _num_tokens(options: argparse.Namespace) -> int:
    """Returns the number of tokens of an answer; the last ones come after the timed part."""
    return int(WARM + options.runs * options.steps + 2)


def _add(engine: DrivenEngine, count: int, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for index in range(count):
        prompt = tuple(5 + (31 * index + 7 * place) % 997 for place in range(PROMPT))
        engine.add(
            GenerationRequest(request_id=f"{count}-{index}", prompt_token_ids=prompt, params=params)
        )


def _take(engine: DrivenEngine, num_steps: int, tokens: Tokens) -> None:
    for _ in range(num_steps):
        for delta in engine.step():
            assert delta.error is None, f"{delta.request_id}: {delta.error}"
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; without it the demonstration model")
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 16, 64, 128])
    parser.add_argument("--micro-batches", type=int, nargs="+", choices=range(1, 5), default=[1, 2])
    parser.add_argument("--runs", type=int, default=6, help="of each, by turns")
    parser.add_argument("--steps", type=int, default=25, help="of a run")
    parser.add_argument("--json", type=Path, help="write everything here")
    return parser
