"""The tiers on ranks: first tokens and steps of 1A1E, with and without a memory and a disk tier."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kv_tiers.opened_model import drop_file_cache, med
from moe_serve.cache.tiers.store import TierStats
from moe_serve.cluster.started_ranks import build_cluster
from moe_serve.config.sections import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from moe_serve.engine.driven_engine import DrivenEngine
from moe_serve.engine.opened_model import ServedCheckpoint
from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams

_PAGE = 16


def model_config(arguments: argparse.Namespace, num_pages: int | None = None) -> ModelConfig:
    length = None if num_pages is None else (num_pages - 1) * _PAGE
    return ModelConfig(path=arguments.model, num_threads=arguments.threads, max_model_len=length)


def opened_ranks(
    arguments: argparse.Namespace, cache: CacheConfig, num_attention: int = 1
) -> DrivenEngine:
    """Starts ranks with the demonstration model, and waits until their disk tier is open."""
    ranks = ClusterConfig(attention_ranks=num_attention, expert_ranks=1)
    config = EngineConfig(
        speculation=SpeculationConfig(method="off"),
        model=model_config(arguments, cache.num_pages),
        cache=cache,
        cluster=ranks,
    )
    engine = build_cluster(config).engine
    while cache.disk_path is not None and not tier_of(engine).is_reading:
        time.sleep(0.01)
    return engine


def tier_of(engine: DrivenEngine) -> TierStats:
    tier = engine.stats().tier
    assert tier is not None, "the engine has a tier"
    return tier


def request_of(length: int, seed: int, num_tokens: int = 1, name: str = "") -> GenerationRequest:
    """Returns a request with random token ids."""
    prompt = tuple(np.random.default_rng(seed).integers(10, 4000, length).tolist())
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id=name or f"{seed}", prompt_token_ids=prompt, params=params)


def answers_of(
    engine: DrivenEngine, wanted: Sequence[GenerationRequest], times: list[float] | None = None
) -> dict[str, list[int]]:
    """Runs requests to their ends. `times` gets the seconds of each step."""
    answers: dict[str, list[int]] = {each.request_id: [] for each in wanted}
    left = set(answers)
    for each in wanted:
        engine.add(each)
    while left:
        begin = time.perf_counter()
        for delta in engine.step():
            assert not delta.error, delta.error
            answers[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                left.discard(delta.request_id)
        if times is not None:
            times.append(time.perf_counter() - begin)
    return answers


def timed(engine: DrivenEngine, request: GenerationRequest) -> float:
    begin = time.perf_counter()
    answers_of(engine, [request])
    return time.perf_counter() - begin


def until_stored(engine: DrivenEngine) -> None:
    """Lets the ranks hand over what they computed, and waits until it is written."""
    while engine.has_work or (tier := tier_of(engine)).num_queued and tier.is_writing:
        engine.step()
        time.sleep(0.001)


def rank_first_token(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times the first token of prompts that are computed, read from the disk, copied from the
    memory tier, or in the cache of a rank. The kinds take turns."""
    length, num_pages = arguments.prompt, arguments.prompt // _PAGE + 8
    checkpoint = ServedCheckpoint.read(model_config(arguments))
    room = num_pages * _PAGE * checkpoint.spec.kv_bytes_per_token(2)  # in the memory, of a prompt
    small = CacheConfig(num_pages=num_pages, disk_path=str(folder), memory_tier_bytes=room)
    large = CacheConfig(num_pages=num_pages, memory_tier_bytes=64 * room)
    times: dict[str, list[float]] = {"cold": [], "disk": [], "memory": [], "cache": []}
    disk, memory = opened_ranks(arguments, small), opened_ranks(arguments, large)
    try:
        known = request_of(length, 1)
        for engine in (disk, memory):
            timed(engine, known)
        until_stored(disk)
        until_stored(memory)  # else the next prompt evicts pages that are not copied yet
        for turn in range(arguments.repeat):
            times["cold"].append(timed(disk, request_of(length, 1000 + turn)))  # evicts the known
            until_stored(disk)
            drop_file_cache(folder)
            hits = tier_of(disk).loads.get("hit", 0)
            times["disk"].append(timed(disk, known))
            assert tier_of(disk).loads.get("hit", 0) > hits, "the prompt was not read"
            timed(memory, request_of(length, 1000 + turn))
            hits = tier_of(memory).hit_tokens
            times["memory"].append(timed(memory, known))
            assert tier_of(memory).hit_tokens > hits, "the prompt was not copied"
            times["cache"].append(timed(memory, known))
    finally:
        disk.close()
        memory.close()
    print(f"1A1E, first token of {length} tokens: cold {med(times['cold'])}")
    for name in ("disk", "memory", "cache"):
        pairs = zip(times[name], times["cold"], strict=True)
        share = statistics.median(warm / cold for warm, cold in pairs)
        print(f"  {name} {med(times[name])}: {share:.3f} of cold")
    return dict(times)


def rank_step_times(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Times the steps of 16 streams on 1A1E whose prompts are never found, without a tier, with a
    memory tier, and with a disk behind it."""
    caches = {
        "off": CacheConfig(),
        "memory": CacheConfig(memory_tier_bytes=2**28),
        "disk": CacheConfig(disk_path=str(folder), memory_tier_bytes=2**28),
    }
    steps: dict[str, list[float]] = {name: [] for name in caches}
    engines = {name: opened_ranks(arguments, cache) for name, cache in caches.items()}
    try:
        for turn in range(-1, arguments.repeat):
            names = list(engines)
            for name in names[turn % 3 :] + names[: turn % 3]:
                wanted = [request_of(128, 9000 + turn * 16 + i, 256) for i in range(16)]
                times: list[float] = []
                answers_of(engines[name], wanted, times)
                steps[name] += times if turn >= 0 else []
    finally:
        for engine in engines.values():
            engine.close()
    result: dict[str, object] = dict(steps)
    for name in ("memory", "disk"):
        median, p99 = (
            float(np.quantile(steps[name], at) / np.quantile(steps["off"], at))
            for at in (0.5, 0.99)
        )
        mean = statistics.mean(steps[name]) / statistics.mean(steps["off"])
        print(f"1A1E, step with {name} over without: median {median:.3f}, mean {mean:.3f}, "
              f"p99 {p99:.3f}")  # fmt: skip
        result[f"{name} over off"] = {"median": median, "mean": mean, "p99": p99}
    off = [float(np.quantile(steps["off"], at)) * 1e3 for at in (0.5, 0.99)]
    print(f"  {len(steps['off'])} steps; without {off[0]:.2f} ms, p99 {off[1]:.2f} ms")
    return result
