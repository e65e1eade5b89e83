"""What recording the routing costs: throughput without, with the default share, with everything.

    python benchmarks/tracing.py --seconds 80 [--attention-ranks 1 --expert-ranks 1]

Rounds of the same requests, the ways in turn and in an order that changes, on one engine. The cost
is the median over rounds of a way's time over that of the way without, with a 95% bootstrap
interval. Prompts are random token ids, answers are not cut short.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from harness.environment import describe_environment
from moe_serve.cluster.any_engine import build_any_engine
from moe_serve.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TraceConfig,
)
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.request import GenerationRequest
from moe_serve.engine.sampling_params import SamplingParams
from moe_serve.engine.tracing import Tracing, trace_header

_DEFAULT = TraceConfig().sample_rate
WAYS: dict[str, tuple[float, bool] | None] = {
    "off": None,
    f"{_DEFAULT:.0%} of requests": (_DEFAULT, False),
    "all requests": (1.0, False),
    "all, with weights": (1.0, True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A way's throughput, and what it costs: time over that without, less 1."""

    tokens_per_s: float
    cost: float
    low: float
    high: float


def main() -> int:
    arguments = _parser().parse_args()
    config = EngineConfig(
        model=ModelConfig(path=arguments.model, num_threads=arguments.threads),
        cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=arguments.requests),
        cluster=ClusterConfig(
            attention_ranks=arguments.attention_ranks, expert_ranks=arguments.expert_ranks
        ),
    )
    built = build_any_engine(config)
    rounds: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            end = time.monotonic() + arguments.seconds
            while time.monotonic() < end:
                times = _round(built, config, Path(folder), arguments, len(rounds))
                rounds.append(times)
    finally:
        built.engine.close()
    rounds = rounds[1:]  # the first warms up
    figures = _figures(rounds, arguments.requests * arguments.tokens)
    print(f"{len(rounds)} rounds of {arguments.requests} requests x {arguments.tokens} tokens")
    for name, figure in figures.items():
        print(
            f"{name:22} {figure.tokens_per_s:8.0f} tokens/s   "
            f"cost {figure.cost:+.2%} [{figure.low:+.2%}, {figure.high:+.2%}]"
        )
    if arguments.json:
        named = {name: asdict(figure) for name, figure in figures.items()}
        report = {"environment": describe_environment(), "figures": named, "rounds": rounds}
        arguments.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def _round(
    built: BuiltEngine,
    config: EngineConfig,
    folder: Path,
    arguments: argparse.Namespace,
    index: int,
) -> dict[str, float]:
    """Seconds of each way, with the same requests."""
    names = list(WAYS)
    shift = index % len(names)
    times = {}
    for name in (*names[shift:], *names[:shift]):
        with _recording(built, config, folder, WAYS[name]):
            start = time.perf_counter()
            _serve(built, arguments, index, name)
            times[name] = time.perf_counter() - start
    return times


@contextmanager
def _recording(
    built: BuiltEngine, config: EngineConfig, folder: Path, way: tuple[float, bool] | None
) -> Iterator[None]:
    """The recording runs inside, and is written after the clock has stopped."""
    if way is None:
        yield
        return
    trace = TraceConfig(directory=str(folder), sample_rate=way[0], weights=way[1], tokens=True)
    tracing = Tracing(trace, built.routes, lambda: trace_header(built, config, "model"))
    tracing.start()
    try:
        yield
    finally:
        tracing.close()


def _serve(built: BuiltEngine, arguments: argparse.Namespace, index: int, way: str) -> None:
    rng = np.random.default_rng(index)
    vocab_size, length = built.layout.vocab_size, arguments.prompt
    for number in range(arguments.requests):
        built.engine.add(
            GenerationRequest(
                request_id=f"{index}-{number}-{way}",
                prompt_token_ids=tuple(rng.integers(1, vocab_size, length).tolist()),
                params=SamplingParams(
                    max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True
                ),
            )
        )
    while built.engine.num_running or built.engine.num_waiting:
        built.engine.step()


def _figures(rounds: list[dict[str, float]], num_tokens: int) -> dict[str, Figure]:
    rng = np.random.default_rng(0)
    figures = {}
    for name in WAYS:
        ratios = np.array([times[name] / times["off"] for times in rounds]) - 1
        drawn = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
        seconds = float(np.median([times[name] for times in rounds]))
        figures[name] = Figure(num_tokens / seconds, float(np.median(ratios)), low, high)
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What recording the routing costs.")
    parser.add_argument("--model", help="checkpoint folder; without it the demonstration model")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attention-ranks", type=int, default=0)
    parser.add_argument("--expert-ranks", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
