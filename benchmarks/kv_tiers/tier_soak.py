"""An hour of prompts on a small disk tier: bytes, budget and memory are sampled all the time."""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil

from moe_serve.cache.tiers.store import TierStats
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


@dataclass(frozen=True, slots=True)
class Row:
    """The tier at one moment."""

    seconds: float  # since the start
    num_pages: int  # in the index
    own_bytes: int  # memory of the process alone, without files
    written_bytes: int

    def __str__(self) -> str:
        megabytes = (
            f"{self.own_bytes / 2**20:.1f} MiB, {self.written_bytes / 2**20:.0f} MiB written"
        )
        return f"{self.num_pages} pages, {megabytes}"


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
    engine = _opened(arguments, folder)
    visitors = Visitors(engine, np.random.default_rng(1))
    samples = FolderSamples(folder)
    threading.Thread(target=samples.watch, daemon=True).start()
    days, rows = set[str](), list[Row]()
    begin, rounds = time.monotonic(), 0
    try:
        while (seconds := time.monotonic() - begin) < arguments.minutes * 60:
            visitors.round()
            rounds += 1
            time.sleep(max(0.0, begin + seconds + arguments.round_s - time.monotonic()))
            days.add(time.strftime("%Y-%m-%d", time.gmtime()))
            if rounds >= _WARM_ROUNDS and (not rows or seconds > rows[-1].seconds + 5):
                rows.append(_row(engine, seconds))
                if len(rows) % 60 == 0:
                    print(f"{seconds / 60:4.0f} min: {rows[-1]}, {visitors.num_wrong} wrong")
        rows.append(_row(engine, seconds))
        stats = engine.stats().tier
    finally:
        samples.is_ending.set()
        engine.close()
    assert stats is not None, "the engine has a tier"
    print(f"{visitors.num_asked} prompts, {visitors.num_repeated} asked again, "
          f"{visitors.num_wrong} wrong")  # fmt: skip
    return {"wrong": visitors.num_wrong} | _judged(arguments, samples, stats, len(days), rows)


def _opened(arguments: argparse.Namespace, folder: Path) -> DrivenEngine:
    cache = CacheConfig(
        num_pages=600,
        disk_path=str(folder),
        disk_bytes=arguments.disk_mib * 2**20,
        disk_write_bytes_per_day=arguments.budget_mib * 2**20,
    )
    config = EngineConfig(
        model=ModelConfig(path=arguments.model, num_threads=arguments.threads),
        scheduler=SchedulerConfig(max_num_seqs=_ROUND),
        cache=cache,
    )
    return build_engine(config).engine


def _judged(
    arguments: argparse.Namespace,
    samples: FolderSamples,
    stats: TierStats,
    num_days: int,
    rows: list[Row],
) -> dict[str, object]:
    """Prints and returns what the folder and the memory took, beside their bounds."""
    bound, budget = arguments.disk_mib * 2**20, arguments.budget_mib * 2**20
    peak = max(row.num_pages for row in rows)
    full = next(row for row in rows if row.num_pages >= 0.98 * peak)
    steady = next((row for row in rows if row.written_bytes >= 1.5 * bound), rows[-1])
    last = statistics.median(row.own_bytes for row in rows[-12:])
    is_within = samples.most_bytes <= bound and stats.written_bytes <= budget * num_days
    print(f"disk: at most {samples.most_bytes} bytes ({samples.most_taken} in blocks) of {bound} "
          f"in {samples.num_samples} samples")  # fmt: skip
    print(f"written: {stats.written_bytes} of {budget} bytes a day, on {num_days} days; "
          f"bounds kept: {is_within}")  # fmt: skip
    print(f"memory: first {rows[0]}; full {full}; written again {steady}; last {rows[-1]}")
    per_page = (full.own_bytes - rows[0].own_bytes) / max(1, full.num_pages - rows[0].num_pages)
    growth = last - steady.own_bytes
    print(f"  until the folder is full: {per_page:.0f} bytes a page; after pages were written "
          f"again: {growth / 2**20:.2f} MiB")  # fmt: skip
    print(f"loads {stats.loads}, saves {stats.saves}, {stats.num_evicted} evicted")
    return {
        "most_bytes": samples.most_bytes, "bound": bound, "samples": samples.num_samples,
        "written": stats.written_bytes, "budget": budget, "days": num_days,
        "bytes_per_page": per_page, "growth_after": growth,
        "loads": stats.loads, "saves": stats.saves,
        "evicted": stats.num_evicted, "is_within": is_within,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip


def _row(engine: DrivenEngine, seconds: float) -> Row:
    """Waits until nothing is queued and the memory of the queue has gone back to the system, and
    looks at the memory."""
    while (stats := engine.stats().tier) is not None and stats.num_queued:
        time.sleep(0.01)
        engine.step()
    assert stats is not None, "the engine has a tier"
    time.sleep(1.3)
    info = psutil.Process().memory_info()
    return Row(seconds, stats.num_pages, info.rss - info.shared, stats.written_bytes)
