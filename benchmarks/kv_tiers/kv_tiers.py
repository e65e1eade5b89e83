"""Measures the KV tiers: first token, overhead, steps, slow disks, restarts, kills, memory, soak.

    python benchmarks/run.py kv_tiers --parts first_token overhead slow_disk restart kills
    python benchmarks/run.py kv_tiers --model build/random-1b --threads 2 --prompt 1024
    python benchmarks/run.py kv_tiers --parts rank_first_token rank_step_times rank_faults
    python benchmarks/run.py kv_tiers --parts page_memory
    python benchmarks/run.py kv_tiers --parts soak --minutes 60

Cold and warm requests take turns in one process. Before a warm request another prompt fills the
cache, so its pages come from the disk; the system's file cache is dropped before. Figures are
medians.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.environment import child_environment, write_report
from kv_tiers.opened_model import (
    drop_file_cache,
    med,
    opened,
    prompt_of,
    tier_of,
    timed,
    until_stored,
)
from kv_tiers.page_memory import page_memory
from kv_tiers.rank_faults import rank_faults, rank_kills
from kv_tiers.rank_tiers import rank_first_token, rank_step_times
from kv_tiers.step_costs import overhead, page_costs, step_times
from kv_tiers.tier_soak import soak
from moe_serve import LLM, SamplingParams
from moe_serve.cache.tiers.segment import Segment
from moe_serve.cache.tiers.store import SavedPage
from moe_serve.engine.schedule.page_tiers import PageTiers

_ANSWER = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
_KILLED = """
import sys
from kv_tiers.opened_model import prompt_of
from moe_serve import LLM, SamplingParams
folder, seed = sys.argv[1], int(sys.argv[2])
with LLM(kv_disk=folder, num_threads=1) as llm:
    print("ready", flush=True)
    for turn in range(10_000):
        prompts = [prompt_of(llm, 200, seed * 100_000 + turn * 4 + i) for i in range(4)]
        llm.generate(prompts, SamplingParams(max_tokens=16), use_progress_bar=False)
"""


def first_token(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times the first token of prompts that are computed, loaded from the disk, or in the cache."""
    length, cold, warm, cached = arguments.prompt, list[float](), list[float](), list[float]()
    with opened(arguments, folder, num_pages=length // 16 + 8) as llm:
        known = prompt_of(llm, length, 1)
        timed(llm, known)
        until_stored(llm)
        for turn in range(arguments.repeat):
            cold.append(timed(llm, prompt_of(llm, length, 1000 + turn)))  # evicts the known one
            until_stored(llm)
            drop_file_cache(folder)
            hits = tier_of(llm).hit_tokens
            warm.append(timed(llm, known))
            assert tier_of(llm).hit_tokens > hits, f"the prompt was not loaded: {tier_of(llm)}"
            cached.append(timed(llm, known))
        rate = tier_of(llm).read_bytes_per_s or 0.0
    ratio = [w / c for w, c in zip(warm, cold, strict=True)]
    print(f"first token of {length} tokens: cold {med(cold)}, cached {med(cached)}")
    share = statistics.median(ratio)
    print(f"  disk {med(warm)}: {share:.3f} of cold, read at {rate / 1e6:.0f} MB/s")
    return {"cold_s": cold, "disk_s": warm, "cached_s": cached, "read_bytes_per_s": rate}


def slow_disk(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times the first token with reads throttled to some rates, beside loading and computing, in
    turns. The disk becomes slow after the start, so what the start measured is wrong."""
    length, real, result = arguments.prompt, Segment.read, dict[str, object]()
    for mb_s in (2, 10, 50, 200, 1000):
        with opened(arguments, folder / str(mb_s), num_pages=length // 16 + 8) as llm:
            known = prompt_of(llm, length, 1)
            timed(llm, known)
            until_stored(llm)
        with opened(arguments, folder / str(mb_s), num_pages=length // 16 + 8) as llm:
            Segment.read = _throttled(real, mb_s * 1e6)  # type: ignore[assignment,method-assign]
            timed(llm, prompt_of(llm, length, 1900))
            times, cached, cold = list[float](), list[float](), list[float]()
            for turn in range(arguments.repeat):
                times.append(timed(llm, known))
                cached.append(timed(llm, known))
                cold.append(timed(llm, prompt_of(llm, length, 2000 + turn)))
            loads, proof = tier_of(llm).loads, _proof_s(llm, length // 16)
            num_bytes = length // 16 * llm.layout.kv_bytes / llm.layout.num_pages
        Segment.read = real  # type: ignore[method-assign]
        transfer, own = num_bytes / (mb_s * 1e6), statistics.median(cached)
        over = {
            name: [each / min(transfer + extra, c) for each, c in zip(times, cold, strict=True)]
            for name, extra in (("bytes", 0.0), ("own", own), ("proof", own + proof))
        }
        later = {name: statistics.median(ratios[1:]) for name, ratios in over.items()}
        print(f"{mb_s:5} MB/s: first {over['bytes'][0]:.2f}, later {later['bytes']:.2f} times the "
              f"better of computing ({med(cold)}) and the bytes; {later['own']:.2f} with a request "
              f"that finds all in memory ({own * 1e3:.1f} ms); {later['proof']:.2f} with digests "
              f"and copies ({proof * 1e3:.1f} ms), too; {loads}")  # fmt: skip
        result[str(mb_s)] = {"times_s": times, "cold_s": cold, "cached_s": cached, "loads": loads}
    return result


def _proof_s(llm: LLM, num_pages: int) -> float:
    """Returns the seconds that one thread takes to prove and to copy so many pages."""
    tier = llm._engine._scheduler.tier  # type: ignore[attr-defined]
    assert isinstance(tier, PageTiers), "the model was opened with a tier"
    data = np.empty(tier._pages.num_bytes, dtype=np.uint8)
    begin = time.perf_counter()
    for page in range(1, num_pages + 1):
        tier._pages.read(page, data)
        sha256(data.data).digest()
    return time.perf_counter() - begin


def _throttled(
    real: Callable[[Segment, int], NDArray[np.uint8]], rate: float
) -> Callable[[Segment, int], NDArray[np.uint8]]:
    lock, free_at = threading.Lock(), [0.0]

    def read(segment: Segment, slot: int) -> NDArray[np.uint8]:
        data = real(segment, slot)
        with lock:  # one page after the other goes over the throttled disk
            now = time.perf_counter()
            end = free_at[0] = max(now, free_at[0]) + len(data) / rate
        if end > now + 0.0005:
            time.sleep(end - now)
        return data

    return read


def restart(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Counts the full pages that a second server finds, compares the answers, and times starts with
    and without the tier, in turns."""
    with opened(arguments, folder) as llm:
        prompts = [prompt_of(llm, 400, seed) for seed in range(40)]
        before = [o.outputs[0].token_ids for o in llm.generate(prompts, _ANSWER)]
        fill(llm, arguments.pages)
    with opened(arguments, folder) as llm:
        outputs = llm.generate(prompts, _ANSWER, use_progress_bar=False)
        loads = tier_of(llm).loads
    found = sum(o.num_cached_tokens for o in outputs) / (40 * (399 - 399 % 16))
    is_equal = [o.outputs[0].token_ids for o in outputs] == before
    ready: dict[str, list[float]] = {"off": [], "on": [], "until it reads": []}
    for _ in range(arguments.repeat):
        for name, path in (("off", None), ("on", str(folder))):
            begin = time.perf_counter()
            with LLM(arguments.model, num_threads=arguments.threads, kv_disk=path) as llm:
                ready[name].append(time.perf_counter() - begin)
                while path is not None and not tier_of(llm).is_reading:
                    time.sleep(0.001)
                if path is not None:
                    ready["until it reads"].append(time.perf_counter() - begin)
                    num_pages = tier_of(llm).num_pages
    ratio = statistics.median(a / b for a, b in zip(ready["on"], ready["off"], strict=True))
    print(f"restart: {found:.1%} of full pages found, answers equal: {is_equal}; {loads}")
    print(f"  ready with {num_pages} pages: {ratio:.2f} times without (medians {med(ready['on'])}, "
          f"{med(ready['off'])}); the tier reads after {med(ready['until it reads'])}")  # fmt: skip
    return {"found": found, "is_equal": is_equal, "num_pages": num_pages, "seconds": ready}


def fill(llm: LLM, num_pages: int) -> None:
    """Stores pages of random content under random keys."""
    tier = llm._engine._scheduler.tier  # type: ignore[attr-defined]
    assert isinstance(tier, PageTiers), "the model was opened with a tier"
    store, size = tier._store, tier._pages.num_bytes
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    for _ in range(num_pages):
        while store.room <= 0:
            time.sleep(0.001)
        store.save(SavedPage(os.urandom(32), os.urandom(32), 16, data))
    until_stored(llm)


def kills(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Kills servers at random moments; a new one must start and answer as without a tier."""
    chance, wrong, failed = random.Random(1), 0, 0
    with opened(arguments, None) as llm:
        prompts = [prompt_of(llm, 200, seed) for seed in (100_000, 1, 200_003)]
        cold = [o.outputs[0].token_ids for o in llm.generate(prompts, _ANSWER)]
    environment = child_environment()
    paths = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    for number in range(arguments.kills):
        command = [sys.executable, "-c", _KILLED, str(folder), str(number)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert worker.stdout is not None, "the output is a pipe"
        failed += worker.stdout.readline() != b"ready\n"
        time.sleep(chance.uniform(0.0, 0.5))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        if number % 5 == 4:
            with opened(arguments, folder) as llm:
                outputs = llm.generate(prompts, _ANSWER, use_progress_bar=False)
                wrong += [o.outputs[0].token_ids for o in outputs] != cold
    print(f"{arguments.kills} kills: {failed} failed starts, {wrong} wrong answers")
    return {"kills": arguments.kills, "failed": failed, "wrong": wrong}


_ONE_PROCESS = (
    first_token, overhead, page_costs, step_times, slow_disk, restart, kills, soak, page_memory
)  # fmt: skip
_RANKS = (rank_first_token, rank_step_times, rank_kills, rank_faults)
PARTS = {each.__name__: each for each in (*_ONE_PROCESS, *_RANKS)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a checkpoint; default: the demonstration model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of a prompt")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--key-file", help="encrypts the pages, in one process")
    parser.add_argument("--pages", type=int, default=1000, help="beside those found, of restart")
    parser.add_argument("--written", type=int, default=30_000, help="pages of page_memory")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the soak")
    parser.add_argument("--round-s", type=float, default=0.0, help="least time of eight prompts")
    parser.add_argument("--disk-mib", type=int, default=1024, help="bound of the soak")
    parser.add_argument("--budget-mib", type=int, default=16384, help="of a day of the soak")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = dict[str, object]()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in arguments.parts:
            report[name] = PARTS[name](arguments, Path(folder) / name)
    if arguments.json is not None:
        write_report(arguments.json, report)
    return 0
