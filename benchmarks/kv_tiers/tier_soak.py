"""An hour of prompts on a small disk tier: bytes, budget and memory are sampled all the time."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from moe_serve.config.sections import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from moe_serve.engine.build import build_engine
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams

_MOST_PROMPTS = 4_000_000
_SAMPLE_S = 0.05
_ROUND = 8  # prompts at once
_ANSWER = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
_WARM_ROUNDS = 40  # before memory is looked at


@dataclass(slots=True)
class FolderSamples:
    """The largest size of a folder that was seen, in samples 50 ms apart."""

    folder: Path
    num_samples: int = 0
    most_bytes: int = 0  # by length
    most_taken: int = 0  # by blocks of the disk
    is_ending: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.is_ending.wait(_SAMPLE_S):
            lengths, blocks = 0, 0
            for root, _, names in os.walk(self.folder):
                for name in names:
                    try:
                        status = os.stat(os.path.join(root, name))
                    except FileNotFoundError:
                        continue  # removed in the meantime
                    lengths, blocks = lengths + status.st_size, blocks + 512 * status.st_blocks
            self.num_samples += 1
            self.most_bytes = max(self.most_bytes, lengths)
            self.most_taken = max(self.most_taken, blocks)


@dataclass(slots=True)
class Visitors:
    """Sends prompts, of which some were asked before, and compares their answers."""

    engine: DrivenEngine
    rng: np.random.Generator
    num_asked: int = 0  # different prompts
    num_repeated: int = 0
    num_wrong: int = 0
    answers: np.ndarray = field(  # of each prompt; written here so that memory does not grow
        default_factory=lambda: np.full((_MOST_PROMPTS, 4), -1, dtype=np.int32)
    )

    def round(self) -> None:
        """Asks for some prompts at once; every third is one of the past, mostly a recent one."""
        numbers = []
        for _ in range(_ROUND):
            if self.num_asked > 100 and self.rng.random() < 0.34:
                back = int(self.rng.exponential(1500)) + _ROUND
                numbers.append(max(0, self.num_asked - back))
                self.num_repeated += 1
            else:
                numbers.append(self.num_asked)
                self.num_asked += 1
        told: dict[str, list[int]] = {}
        for index, number in enumerate(numbers):
            told[f"{index}"] = []
            self.engine.add(_request(index, number))
        while self.engine.has_work:
            for delta in self.engine.step():
                told[delta.request_id] += delta.token_ids
        for index, number in enumerate(numbers):
            known, answer = self.answers[number], told[f"{index}"]
            if known[0] < 0:
                known[:] = answer
            else:
                self.num_wrong += known.tolist() != answer


def _request(index: int, number: int) -> GenerationRequest:
    rng = np.random.default_rng(number)
    prompt = tuple(rng.integers(10, 4000, int(rng.integers(100, 600))).tolist())
    return GenerationRequest(request_id=f"{index}", prompt_token_ids=prompt, params=_ANSWER)


def soak(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Serves prompts for some minutes, with bounds that are reached."""
    bound, budget = arguments.disk_mib * 2**20, arguments.budget_mib * 2**20
    config = EngineConfig(
        model=ModelConfig(path=arguments.model, num_threads=arguments.threads),
        scheduler=SchedulerConfig(max_num_seqs=_ROUND),
        cache=CacheConfig(
            num_pages=600,
            disk_path=str(folder),
            disk_bytes=bound,
            disk_write_bytes_per_day=budget,
        ),
    )
    engine = build_engine(config).engine
    visitors = Visitors(engine, np.random.default_rng(1))
    samples = FolderSamples(folder)
    thread = threading.Thread(target=samples.watch, daemon=True)
    thread.start()
    days = {time.strftime("%Y-%m-%d", time.gmtime())}
    memory: list[tuple[float, int, int, int]] = []  # seconds, pages in the index, bytes, written
    begin, rounds = time.monotonic(), 0
    try:
        while (seconds := time.monotonic() - begin) < arguments.minutes * 60:
            visitors.round()
            rounds += 1
            days.add(time.strftime("%Y-%m-%d", time.gmtime()))
            if rounds >= _WARM_ROUNDS and (not memory or seconds > memory[-1][0] + 5):
                memory.append((seconds, *_state(engine)))
                if int(seconds / 300) != int((memory[-2][0] if memory[1:] else 0) / 300):
                    print(f"{seconds / 60:4.0f} min: {_told(memory[-1])}, {visitors.num_wrong} wrong",
                          flush=True)
        stats = engine.stats().tier
    finally:
        samples.is_ending.set()
        engine.close()
    assert stats is not None, "the engine has a tier"
    peak = max(pages for _, pages, _, _ in memory)
    full = [row for row in memory if row[1] >= 0.98 * peak]
    growth = statistics.median(row[2] for row in memory[-12:]) - memory[0][2]
    per_page = growth / max(1, peak - memory[0][1])
    num_days = len(days)
    is_within = samples.most_bytes <= bound and stats.written_bytes <= budget * num_days
    print(f"disk: at most {samples.most_bytes} bytes ({samples.most_taken} in blocks) of {bound} "
          f"in {samples.num_samples} samples")
    print(f"written: {stats.written_bytes} of {budget} bytes a day, on {num_days} days")
    print(f"memory: first {_told(memory[0])}; full {_told(full[0])}; last {_told(memory[-1])}")
    print(f"  growth {growth / 2**20:.2f} MiB: {per_page:.0f} bytes a page")
    print(f"{visitors.num_asked} prompts, {visitors.num_repeated} asked again, "
          f"{visitors.num_wrong} wrong; loads {stats.loads}, saves {stats.saves}, "
          f"{stats.num_evicted} evicted; bounds kept: {is_within}")
    return {
        "most_bytes": samples.most_bytes, "bound": bound, "samples": samples.num_samples,
        "written": stats.written_bytes, "budget": budget, "days": num_days, "memory": memory,
        "bytes_per_page": per_page, "wrong": visitors.num_wrong, "loads": stats.loads,
        "saves": stats.saves, "evicted": stats.num_evicted, "is_within": is_within,
    }  # fmt: skip


def _state(engine: DrivenEngine) -> tuple[int, int, int]:
    """Waits until nothing is queued; returns the pages of the index, the process's own memory, and
    the bytes written."""
    while (stats := engine.stats().tier) is not None and stats.num_queued:
        time.sleep(0.01)
        engine.step()
    assert stats is not None, "the engine has a tier"
    info = psutil.Process().memory_info()
    return stats.num_pages, info.rss - info.shared, stats.written_bytes


def _told(row: tuple[float, int, int, int]) -> str:
    return f"{row[1]} pages, {row[2] / 2**20:.1f} MiB, {row[3] / 2**20:.0f} MiB written"
