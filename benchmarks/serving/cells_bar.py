"""Measures in under four minutes how far a prefill cell keeps long prompts out of running answers.

    python benchmarks/run.py cells_bar

Four streams generate while long prompts arrive. The layouts are one prefill and one decode cell,
the same with a prefill cell of lower priority (`cells.prefill_nice`), and two replicas. They take
turns on the same prompts, at each of the loads. The bar is the P99 of the time between two tokens
of a stream, over that of the replicas: at most 0.5.

A P99 shows prompts only if more than 1% of the gaps meet one. So each load also has the share of
the replicas' gaps above twice their median, and the ratio of the mean of the longest 1%. The
last line of a layout says with what its gaps coincide (`serving/cell_events.py`), and their median.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from harness.environment import write_report
from moe_serve.cluster.cells.cells_engine import CellsEngine
from serving.cell_events import GapEvents
from serving.cells import LAYOUTS, engine_of, rotated, run_streams

OWN, NICE, REPLICAS = "prefill and decode", "the same, nice", "two replicas"
# (tokens of a prompt, seconds between two, tokens of a step)
LOADS = ((1500, 0.7, 256), (1000, 1.0, 256), (1500, 2.0, 1024))


def measure(options: argparse.Namespace, load: tuple[int, float, int]) -> dict[str, Any]:
    tokens, every, chunk = load
    of = SimpleNamespace(**{**vars(options), "tokens": tokens, "every": every, "chunk": chunk})
    names = [OWN, NICE, REPLICAS]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as opened:
        engines, events = {}, {}
        for name in names:
            layout, nice = LAYOUTS[REPLICAS if name == REPLICAS else OWN], 0
            if name == NICE:
                nice = options.nice
            engines[name] = engine = engine_of(of, layout, prefill_nice=nice)
            assert isinstance(engine, CellsEngine), "there are two cells"
            opened.callback(engine.close)
            events[name] = GapEvents(engine)
        for turn in range(options.rounds):
            for name in rotated(names, turn):
                found[name].append(run_streams(engines[name], of, turn, events[name]))
    runs = {name: {**_summary(each), **_events(events[name])} for name, each in found.items()}
    return {"load": load, "runs": runs}


def _events(events: GapEvents) -> dict[str, Any]:
    return {"event_shares": events.shares(), "event_medians_ms": events.medians_ms()}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of all gaps of all rounds together."""
    gaps = np.concatenate([run["gaps"] for run in runs])
    p50, p99 = np.percentile(gaps, [50, 99])
    return {
        "p50_ms": 1e3 * float(p50),
        "p99_ms": 1e3 * float(p99),
        "worst_ms": 1e3 * float(np.sort(gaps)[-max(1, len(gaps) // 100) :].mean()),
        "share_late": float((gaps > 2 * p50).mean()),
        "tokens_per_s": statistics.median(run["tokens_per_s"] for run in runs),
    }


def show(found: dict[str, Any]) -> None:
    tokens, every, chunk = found["load"]
    runs = found["runs"]
    late = runs[REPLICAS]["share_late"]
    print(
        f"prompts of {tokens} tokens every {every:g} s in steps of {chunk}; "
        f"{late:.1%} of the replicas' gaps are longer than twice their median"
    )
    for name, of in runs.items():
        print(
            f"  {name:20} P50 {of['p50_ms']:6.1f} ms  P99 {of['p99_ms']:6.1f} ms  longest 1% "
            f"{of['worst_ms']:6.1f} ms  {of['tokens_per_s']:5.0f} tokens/s"
        )
        medians = of["event_medians_ms"]
        shares = of["event_shares"]
        shown = [f"{event} {shares[event]:.2%} ({ms:.1f} ms)" for event, ms in medians.items()]
        print(f"  {'':20} gaps with {', '.join(shown)}")
    for name in (OWN, NICE):
        ratios = [runs[name][key] / runs[REPLICAS][key] for key in ("p99_ms", "worst_ms")]
        print(f"  {name} / two replicas: P99 {ratios[0]:.2f}, longest 1% {ratios[1]:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a checkpoint; default: the demonstration model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nice", type=int, default=10, help="of the prefill cell's processes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = []
    for load in LOADS:
        report.append(measure(options, load))
        show(report[-1])
    write_report(options.json, {"loads": report})
    return 0
