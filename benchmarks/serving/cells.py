"""Compares cells that read prompts and cells that generate with replicas and with a single cell.

    python benchmarks/run.py cells --seconds 20 --rounds 3
    python benchmarks/run.py cells build/random-8k --tokens 8000 --only moves

`streams`: some requests generate while long prompts arrive. The layouts take turns within a run,
on the same prompts. The figures are the time between two tokens of a stream, and all tokens per
second.

`moves`: one request generates in one of two replicas, whose cell is then drained. The figures are
the time and the steps for which it was in no cell, beside the time that reading its tokens again
would take; and what a hand-over after a prompt adds to the time to its second token.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.environment import write_report
from moe_serve.cluster.cells.cells_engine import CellsEngine
from moe_serve.cluster.started_cells import build_any_engine
from moe_serve.config.cells import CellsConfig, HandOverName
from moe_serve.config.sections import EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.moves_stats import MovesStats
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from serving.cell_events import GapEvents

LAYOUTS = {
    "prefill and decode": "1x(1A1E prefill) 1x(1A1E decode)",
    "two replicas": "2x(1A1E)",
    "one cell": "1x(1A1E)",
}
Options = argparse.Namespace | SimpleNamespace
_names = itertools.count()


def engine_of(
    options: Options, layout: str, hand_over: HandOverName = "always", prefill_nice: int = 0
) -> DrivenEngine:
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(path=options.model, num_threads=1),
        scheduler=SchedulerConfig(max_batched_tokens=options.chunk),
        cells=CellsConfig(
            layout=layout, hand_over=hand_over, min_tokens=64, prefill_nice=prefill_nice
        ),
    )
    return build_any_engine(config).engine


def request(num_tokens: int, max_tokens: int, seed: int) -> GenerationRequest:
    rng = np.random.default_rng(seed)
    return GenerationRequest(
        request_id=f"b{next(_names)}",
        prompt_token_ids=tuple(rng.integers(10, 4000, num_tokens).tolist()),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )


def run_streams(
    engine: DrivenEngine, options: Options, seed: int, events: GapEvents | None = None
) -> dict[str, Any]:
    """Streams generate while prompts arrive, for some seconds. `events`: counts with what the gaps
    between two tokens coincide."""
    begin = time.monotonic()
    end, last, gaps, num_tokens = begin + options.seconds, dict[str, float](), list[float](), 0
    streams: set[str] = set()
    opened: set[str] = set()
    next_prompt, seeds = begin + options.every / 2, itertools.count(1000 * seed)

    def add(each: GenerationRequest) -> str:
        engine.add(each)
        opened.add(each.request_id)
        return each.request_id

    while time.monotonic() < end:
        while len(streams) < options.streams:
            name = add(request(24, 400, next(seeds)))
            streams.add(name)
            if events is not None:
                events.watch(name)
        if time.monotonic() >= next_prompt:
            next_prompt += options.every
            add(request(options.tokens, 8, next(seeds)))
        for delta in engine.step():
            now, name = time.monotonic(), delta.request_id
            num_tokens += len(delta.token_ids)
            if name in streams and name in last:
                gaps.append(now - last[name])
            last[name] = now
            if delta.finish_reason is not None:
                streams.discard(name)
                opened.discard(name)
    for name in opened:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    p50, p99 = np.percentile(gaps, [50, 99])
    return {
        "gap_p50_ms": 1e3 * p50,
        "gap_p99_ms": 1e3 * p99,
        "tokens_per_s": num_tokens / options.seconds,
        "gaps": gaps,
    }


def streams_part(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    with ExitStack() as opened:
        engines = {}
        for name, layout in LAYOUTS.items():
            engines[name] = engine_of(options, layout)
            opened.callback(engines[name].close)
        for turn in range(options.rounds):
            for name in rotated(list(LAYOUTS), turn):
                run = run_streams(engines[name], options, turn)
                found[name].append({key: value for key, value in run.items() if key != "gaps"})
    print(f"{'layout':20}{'gap P50, ms':>13}{'gap P99, ms':>13}{'tokens/s':>11}")
    for name, runs in found.items():
        figures = [statistics.median(run[key] for run in runs) for key in runs[0]]
        print(f"{name:20}{figures[0]:13.1f}{figures[1]:13.1f}{figures[2]:11.0f}")
    pairs = zip(found["prefill and decode"], found["two replicas"], strict=True)
    ratio = statistics.median(a["gap_p99_ms"] / b["gap_p99_ms"] for a, b in pairs)
    print(f"gap P99, prefill and decode / two replicas: {ratio:.2f}")
    return {"runs": found, "p99_ratio": ratio}


def rotated(names: list[str], turn: int) -> list[str]:
    """Returns the order of layouts in a round. Each layout is first in some round."""
    place = turn % len(names)
    return names[place:] + names[:place]


def _first_tokens(engine: DrivenEngine, each: GenerationRequest, count: int) -> list[float]:
    """Adds a request and returns the seconds until each of its first tokens."""
    begin, times = time.monotonic(), list[float]()
    engine.add(each)
    while len(times) < count:
        for delta in engine.step():
            if delta.request_id == each.request_id:
                times += [time.monotonic() - begin] * len(delta.token_ids)
    return times


def _finish(engine: DrivenEngine, name: str) -> None:
    engine.abort(name)
    while engine.has_work:
        engine.step()


def _moves(engine: DrivenEngine) -> MovesStats:
    moves = engine.stats().moves
    assert moves is not None, "there are several cells"
    return moves


def drained(engine: CellsEngine, num_tokens: int, seed: int) -> dict[str, float]:
    """A request with `num_tokens` generates; its cell is drained."""
    each = request(num_tokens, 200, seed)
    times = _first_tokens(engine, each, 6)
    before = _moves(engine)
    home = next(cell for cell in engine.cells if cell.engine.num_running)
    engine.drain(home.index, is_draining=True)
    while _moves(engine).ended.get(("drain", "done"), 0) == before.ended.get(("drain", "done"), 0):
        engine.step()
    after = _moves(engine)
    engine.drain(home.index, is_draining=False)
    _finish(engine, each.request_id)
    return {
        "tokens": num_tokens,
        "downtime_ms": 1e3 * (after.downtime_s.total - before.downtime_s.total),
        "downtime_steps": after.downtime_steps.total - before.downtime_steps.total,
        "recomputed": after.num_recomputed_tokens - before.num_recomputed_tokens,
        "reading_again_ms": 1e3 * times[0],
    }


def handed_over(engine: DrivenEngine, num_tokens: int, seed: int) -> dict[str, float]:
    """Returns the times to the first and second token, and the part spent in no cell."""
    before = _moves(engine)
    each = request(num_tokens, 12, seed)
    times = _first_tokens(engine, each, 12)
    _finish(engine, each.request_id)
    after = _moves(engine)
    seconds = after.downtime_s.total - before.downtime_s.total
    return {
        "tokens": num_tokens,
        "ttft_ms": 1e3 * times[0],
        "second_token_ms": 1e3 * (times[1] - times[0]),
        "exposed_ms": 1e3 * seconds,
        "share_of_ttft": seconds / times[0],
    }


def moves_part(options: argparse.Namespace) -> dict[str, Any]:
    lengths = [options.tokens // 8, options.tokens // 2, options.tokens]
    drains: list[dict[str, float]] = []
    overs: list[dict[str, float]] = []
    engine = engine_of(options, LAYOUTS["two replicas"])
    assert isinstance(engine, CellsEngine), "two cells"
    try:
        for seed, count in enumerate(lengths * options.rounds):
            drains.append(drained(engine, count, 77 + seed))
    finally:
        engine.close()
    engine = engine_of(options, LAYOUTS["prefill and decode"])
    try:
        for seed, count in enumerate(lengths * options.rounds):
            overs.append(handed_over(engine, count, 177 + seed))
    finally:
        engine.close()
    _show("drained", drains, lengths)
    _show("handed over", overs, lengths)
    return {"drained": drains, "handed_over": overs}


def _show(title: str, rows: Sequence[dict[str, float]], lengths: Sequence[int]) -> None:
    print(f"{title}: medians")
    for count in lengths:
        own = [row for row in rows if row["tokens"] == count]
        figures = {key: statistics.median(row[key] for row in own) for key in own[0]}
        print("  " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a checkpoint; default: the demonstration model")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of a long prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="most tokens of a step")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long prompts")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("streams", "moves"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {}
    if options.only != "moves":
        report["streams"] = streams_part(options)
    if options.only != "streams":
        report["moves"] = moves_part(options)
    write_report(options.json, report)
    return 0
