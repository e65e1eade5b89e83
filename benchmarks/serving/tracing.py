"""Measures throughput with and without recording, counting and returning experts.

    python benchmarks/run.py tracing --seconds 80 [--attention-ranks 1 --expert-ranks 1]

Rounds of the same requests run on one engine with each variant in turn, in an order that changes.
The cost of a variant is its time relative to that without tracing, as the median over rounds with a
95% bootstrap interval. It is given for the clock and for the CPU time of this process, which other
programs disturb less. The table also has the share of this thread's CPU time in the tap, the
listeners and the recorder. This share is steady on a busy machine, but does not include their
effect on the CPU caches and the thread that writes to the disk. Prompts are random token ids, and
answers have their full length.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.environment import write_report
from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    TraceConfig,
)
from moe_serve.engine.build import BuiltEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.routes.route_records import RouteListeners
from moe_serve.engine.tracing import Tracing, trace_header
from moe_serve.http.dashboard.facts import dashboard_facts
from moe_serve.pipeline.route_tap import RouteTap

_OWN: tuple[tuple[type, str], ...] = (
    (RouteListeners, "with_requests"),
    (RouteListeners, "notify"),
    (RouteTap, "end"),
)
_DEFAULT = TraceConfig().sample_rate
Way = tuple[float, bool] | Literal["counted", "told"] | None
WAYS: dict[str, Way] = {
    "off": None,
    "the dashboard's window": "counted",
    "told to all clients": "told",
    f"{_DEFAULT:.0%} of requests": (_DEFAULT, False),
    "all requests": (1.0, False),
    "all, with weights": (1.0, True),
}


@dataclass(frozen=True, slots=True)
class Seconds:
    """The times of one variant in one round."""

    clock: float
    cpu: float
    own_share: float  # of this thread's CPU time


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time relative to that without tracing, minus 1, with its interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:+.2%} [{self.low:+.2%}, {self.high:+.2%}]"


@dataclass(frozen=True, slots=True)
class Figure:
    """The throughput of a variant, and its cost."""

    tokens_per_s: float
    cost: Ratio
    cpu_cost: Ratio
    own_share: float


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(path=arguments.model, num_threads=arguments.threads),
        cache=CacheConfig(prefix_cache=False),
        scheduler=SchedulerConfig(max_num_seqs=arguments.requests),
        cluster=ClusterConfig(
            attention_ranks=arguments.attention_ranks, expert_ranks=arguments.expert_ranks
        ),
    )
    built = build_any_engine(config)
    rounds: list[dict[str, Seconds]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            end = time.monotonic() + arguments.seconds
            while time.monotonic() < end or len(rounds) < 2:
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
            f"cost {figure.cost}   of CPU time {figure.cpu_cost}   "
            f"own {figure.own_share:.2%}"
        )
    named = {name: asdict(figure) for name, figure in figures.items()}
    write_report(arguments.json, {"figures": named, "rounds": rounds})
    return 0


def _round(
    built: BuiltEngine,
    config: EngineConfig,
    folder: Path,
    arguments: argparse.Namespace,
    index: int,
) -> dict[str, Seconds]:
    """Returns the seconds of each variant with the same requests."""
    names = list(WAYS)
    shift = index % len(names)
    times = {}
    for name in (*names[shift:], *names[:shift]):
        with _recording(built, config, folder, WAYS[name]):
            start, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
            with _own_time() as own:
                _serve(built, arguments, index, name)
            share = own.seconds / (time.thread_time() - thread)
            times[name] = Seconds(time.perf_counter() - start, time.process_time() - cpu, share)
    return times


@contextmanager
def _recording(built: BuiltEngine, config: EngineConfig, folder: Path, way: Way) -> Iterator[None]:
    """Records inside the block; the recording is written after the clock has stopped."""
    if way is None or way == "told":
        yield
        return
    if way == "counted":
        counted = dashboard_facts(built, config).experts
        yield
        if counted is not None:
            built.routes.remove(counted)
        return
    trace = TraceConfig(directory=str(folder), sample_rate=way[0], weights=way[1], tokens=True)
    tracing = Tracing(trace, built.routes, lambda: trace_header(built, config, "model"))
    tracing.start()
    try:
        yield
    finally:
        tracing.close()


@dataclass(slots=True)
class _Own:
    """The CPU seconds inside the functions of `_OWN`."""

    seconds: float = 0.0


@contextmanager
def _own_time() -> Iterator[_Own]:
    """Measures the functions that tracing adds to a step, while the block runs."""
    own, originals = _Own(), [getattr(kind, name) for kind, name in _OWN]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments)
            finally:
                own.seconds += time.thread_time() - start

        return call

    for (kind, name), original in zip(_OWN, originals, strict=True):
        setattr(kind, name, timed(original))
    try:
        yield own
    finally:
        for (kind, name), original in zip(_OWN, originals, strict=True):
            setattr(kind, name, original)


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
                wants_routed_experts=WAYS[way] == "told",
            )
        )
    while built.engine.num_running or built.engine.num_waiting:
        built.engine.step()


def _figures(rounds: list[dict[str, Seconds]], num_tokens: int) -> dict[str, Figure]:
    figures = {}
    for name in WAYS:
        seconds = float(np.median([times[name].clock for times in rounds]))
        clock = _ratio([times[name].clock / times["off"].clock for times in rounds])
        cpu = _ratio([times[name].cpu / times["off"].cpu for times in rounds])
        own = float(np.median([times[name].own_share for times in rounds]))
        figures[name] = Figure(num_tokens / seconds, clock, cpu, own)
    return figures


def _ratio(ratios: list[float]) -> Ratio:
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1) - 1
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    return Ratio(float(np.median(ratios)) - 1, low, high)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
