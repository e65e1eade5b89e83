"""Measures how much loads of adapters slow the steps beside them, with and without rests.

    python benchmarks/run.py adapter_loads                  LoRAs of attention and all experts
    python benchmarks/run.py adapter_loads --on attention

One thread steps an engine with the demonstration model. Another one loads random LoRAs one after
the other: with rests, without rests, or not at all, in turns. "Longest stretch": the most processor
time that the loading thread uses between two rests; the engine's thread may have to wait as long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.environment import write_report
from moe_serve.adapters.adapter_build import AdapterBuilder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.load_rests import LoadRests
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.http.server import SWITCH_INTERVAL_S
from moe_serve.model.checkpoint.checkpoint import demo_model_folder
from moe_serve.model.load.loader import ModelLoader
from offline.random_adapters import write_loras

_CASES = ("nothing loads", "without rests", "with rests")


class CountedRests(LoadRests):
    """Counts the processor time between two rests."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0

    def __call__(self) -> None:
        worked_s = time.thread_time() - self._rested_at
        before = self._rested_at
        super().__call__()
        if self._rested_at != before or not self._is_on:
            self.longest_s = max(self.longest_s, worked_s)


@dataclass(slots=True)
class Found:
    steps_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    load_cpu_s: list[float] = field(default_factory=list)
    longest_s: float = 0.0


def steps_of(engine: BuiltEngine, num_streams: int, num_tokens: int, name: str) -> list[float]:
    """Returns the times of the steps that only decode."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for stream in range(num_streams):
        prompt = tuple(range(1 + stream, 9 + stream))
        engine.engine.add(
            GenerationRequest(request_id=f"{name} {stream}", prompt_token_ids=prompt, params=params)
        )
    found = []
    while engine.engine.has_work:
        clock = time.perf_counter()
        engine.engine.step()
        found.append(time.perf_counter() - clock)
    return found[2:]


def loading(
    builder: AdapterBuilder, folders: list[str], found: Found, is_over: Callable[[], bool]
) -> None:
    while not is_over():
        for folder in folders:
            if is_over():
                return
            clock, cpu = time.perf_counter(), time.thread_time()
            with open_unchanged(Path(folder)) as files:
                builder.build(files)
            found.load_s.append(time.perf_counter() - clock)
            found.load_cpu_s.append(time.thread_time() - cpu)


def measure(options: argparse.Namespace, root: Path) -> dict[str, Found]:
    loader = ModelLoader(demo_model_folder())
    folders = list(write_loras(loader, root, 2, options.on).values())
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=ModelConfig(num_threads=1, max_model_len=1024),
        scheduler=SchedulerConfig(max_num_seqs=16),
        cache=CacheConfig(prefix_cache=False),
    )
    engine, found = build_engine(config), {case: Found() for case in _CASES}
    try:
        for number in range(options.rounds + 1):  # the first is not counted
            for case in _CASES:
                one = Found()
                _round(engine, loader, folders, options, case, one)
                if number:
                    total = found[case]
                    total.steps_s += one.steps_s
                    total.load_s += one.load_s
                    total.load_cpu_s += one.load_cpu_s
                    total.longest_s = max(total.longest_s, one.longest_s)
    finally:
        engine.engine.close()
    return found


def _round(
    engine: BuiltEngine,
    loader: ModelLoader,
    folders: list[str],
    options: argparse.Namespace,
    case: str,
    found: Found,
) -> None:
    builder, is_over = AdapterBuilder(loader, AdapterConfig()), threading.Event()
    builder.rests = rests = CountedRests()
    if case == "with rests":
        rests.begin()
    thread = threading.Thread(target=loading, args=(builder, folders, found, is_over.is_set))
    if case != "nothing loads":
        thread.start()
    found.steps_s += steps_of(engine, options.streams, options.tokens, case)
    is_over.set()
    if case != "nothing loads":
        thread.join()
    found.longest_s = rests.longest_s


def lines(found: dict[str, Found]) -> list[str]:
    base = found["nothing loads"]
    shown = []
    for case, each in found.items():
        ratios = [
            np.quantile(each.steps_s, q) / np.quantile(base.steps_s, q) for q in (0.5, 0.9, 0.99)
        ]
        text = f"{case:14} step p50, p90, p99 of those beside nothing: " + ", ".join(
            f"{ratio:.2f}" for ratio in ratios
        )
        if each.load_s:
            text += (
                f"; a load takes {statistics.median(each.load_s):.3f} s and "
                f"{statistics.median(each.load_cpu_s) * 1e3:.1f} ms of a core, longest stretch "
                f"{each.longest_s * 1e3:.2f} ms"
            )
        shown.append(f"{text} ({len(each.steps_s)} steps)")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--on", choices=("attention", "all"), default="all")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a server
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print("\n".join(lines(found)))
    if options.json is not None:
        write_report(options.json, {case: vars_of(each) for case, each in found.items()})
    return 0


def vars_of(found: Found) -> dict[str, object]:
    return {"steps_s": found.steps_s, "load_s": found.load_s, "longest_s": found.longest_s}


if __name__ == "__main__":
    sys.exit(main())
