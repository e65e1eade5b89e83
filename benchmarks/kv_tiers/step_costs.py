"""Measures the cost of a disk tier for 16 streams whose prompts are never found."""

from __future__ import annotations

import argparse
import resource
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kv_tiers.opened_model import med, opened, prompt_of, tier_of, until_stored
from moe_serve import LLM, SamplingParams
from moe_serve.engine.request.request import TokenDelta
from moe_serve.engine.schedule.page_tiers import PageTiers


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


@dataclass(slots=True)
class _UpdateCosts:
    """The costs of `PageTiers.update` in the steps that hand over pages."""

    tier: PageTiers
    cpu_s: float = 0.0
    num_waits: int = 0  # times that the thread waited for a lock, mostly the interpreter's
    num_steps: int = 0
    longest_s: float = 0.0  # processor time of the step with the most of it

    def watch(self) -> None:
        """Measures every update from now on."""
        real = self.tier.update

        def update() -> None:
            begin, waits, num_fresh = time.thread_time(), _num_waits(), len(self.tier._fresh)
            real()
            if len(self.tier._fresh) < num_fresh:
                seconds = time.thread_time() - begin
                self.cpu_s, self.num_steps = self.cpu_s + seconds, self.num_steps + 1
                self.num_waits += _num_waits() - waits
                self.longest_s = max(self.longest_s, seconds)

        self.tier.update = update  # type: ignore[method-assign]


def page_costs(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Counts the processor time of a stored page on the engine's thread and on the one that writes,
    and how often the engine's thread waits for a lock meanwhile, with 16 streams."""
    params = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
    rows: list[dict[str, float]] = []
    with opened(arguments, folder) as llm:
        tier = llm._engine._scheduler.tier  # type: ignore[attr-defined]
        assert isinstance(tier, PageTiers), "the model was opened with a tier"
        tier.update()
        costs = _UpdateCosts(tier)
        costs.watch()
        for turn in range(-1, arguments.repeat):
            costs.cpu_s, costs.num_waits, costs.num_steps, costs.longest_s = 0.0, 0, 0, 0.0
            writer, saved = _writer_s(), tier_of(llm).saves.get("saved", 0)
            prompts = [prompt_of(llm, 128, 9000 + turn * 16 + i) for i in range(16)]
            llm.generate(prompts, params, use_progress_bar=False)
            until_stored(llm)
            num_pages = tier_of(llm).saves["saved"] - saved
            row = {
                "pages": num_pages,
                "engine_us": costs.cpu_s / num_pages * 1e6,
                "writer_us": (_writer_s() - writer) / num_pages * 1e6,
                "waits": costs.num_waits / num_pages,
                "steps": costs.num_steps,
                "longest_us": costs.longest_s * 1e6,
            }
            rows += [row] if turn >= 0 else []
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(f"a page of {tier._pages.num_bytes} bytes: {medians['engine_us']:.1f} us of the engine's "
          f"thread, which waits {medians['waits']:.2f} times; {medians['writer_us']:.1f} us of the "
          "one that writes")  # fmt: skip
    print(f"  {medians['pages']:.0f} pages in {medians['steps']:.0f} steps, the longest with "
          f"{medians['longest_us']:.0f} us")  # fmt: skip
    return {"rows": rows}


def _num_waits() -> int:
    """Returns how often the calling thread gave up its processor to wait."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


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
