"""Measures the cost of a disk tier for 16 streams whose prompts are never found."""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path

import numpy as np

from kv_tiers.opened_model import med, opened, prompt_of, tier_of
from moe_serve import LLM, SamplingParams
from moe_serve.engine.request.request import TokenDelta


def overhead(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times 16 streams whose prompts are never found, with and without the tier, and counts the
    processor time of the engine's thread and of the one that writes, by stored page."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    used: dict[str, list[float]] = {"off": [], "on": [], "writer": []}
    with opened(arguments, None) as off, opened(arguments, folder) as on:
        params = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
        for turn in range(-1, arguments.repeat):
            for name, llm in (("off", off), ("on", on))[:: 1 if turn % 2 else -1]:
                prompts = [prompt_of(llm, 128, 5000 + turn * 16 + i) for i in range(16)]
                begin, cpu, writer = time.perf_counter(), time.thread_time(), _writer_s()
                llm.generate(prompts, params, use_progress_bar=False)
                if turn >= 0:
                    rates[name].append(16 * 256 / (time.perf_counter() - begin))
                    used[name].append(time.thread_time() - cpu)
                    used["writer"] += [_writer_s() - writer] if name == "on" else []
        tier = tier_of(on)
    ratios = [a / b for a, b in zip(rates["on"], rates["off"], strict=True)]
    print(f"16 streams, tokens/s with the tier over without: {statistics.median(ratios):.3f}")
    print(f"  {min(ratios):.3f} to {max(ratios):.3f}; {tier.saves} pages")
    shares = [a / b for a, b in zip(used["on"], used["off"], strict=True)]
    print(f"  processor time of the engine's thread: {statistics.median(shares):.3f} of that "
          f"without ({min(shares):.3f} to {max(shares):.3f}); of the writer {med(used['writer'])} "
          f"beside {med(used['on'])}")  # fmt: skip
    return {"rates": rates, "cpu_s": used, "saves": tier.saves}


def _writer_s() -> float:
    """Returns the processor time of the thread that writes."""
    writers = [each for each in threading.enumerate() if each.name == "moe-serve-kv-writer"]
    clocks = [time.pthread_getcpuclockid(each.ident) for each in writers if each.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def step_times(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times the steps of 16 streams whose prompts are never found, with and without the tier."""
    steps: dict[str, list[float]] = {"off": [], "on": []}
    params = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
    with opened(arguments, None) as off, opened(arguments, folder) as on:
        for turn in range(-1, arguments.repeat):
            for name, llm in (("off", off), ("on", on))[:: 1 if turn % 2 else -1]:
                prompts = [prompt_of(llm, 128, 7000 + turn * 16 + i) for i in range(16)]
                times = timed_steps(llm, prompts, params)
                steps[name] += times if turn >= 0 else []
    result = dict[str, object]()
    for title, at in (("median", 0.5), ("p99", 0.99)):
        off_s, on_s = (float(np.quantile(steps[name], at)) for name in ("off", "on"))
        print(f"step, {title}: {on_s / off_s:.3f} ({on_s * 1e3:.2f} over {off_s * 1e3:.2f} ms)")
        result[title] = {"off_s": off_s, "on_s": on_s}
    means = [statistics.mean(steps[name]) for name in ("on", "off")]
    print(f"step, mean: {means[0] / means[1]:.3f}; {len(steps['on'])} steps each")
    return result | {"mean": means}


def timed_steps(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[float]:
    """Returns the seconds of each of the engine's steps."""
    engine, times = llm._engine, list[float]()
    real = engine.step

    def step() -> list[TokenDelta]:
        begin = time.perf_counter()
        deltas = real()
        times.append(time.perf_counter() - begin)
        return deltas

    engine.step = step  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, use_progress_bar=False)
    finally:
        del engine.step
    return times
