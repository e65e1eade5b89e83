"""Adapters with what else decides how a step runs: groups of layers, micro-batches, a disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.config.sections import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PipelineConfig,
    SchedulerConfig,
)
from moe_serve.engine.build import BuiltEngine, build_engine
from moe_serve.engine.request.request import GenerationRequest
from tests.support.adapters.adapter_folders import write_esft, write_lora
from tests.support.adapters.answers import GREEDY

NAMES = (None, "lora", "esft")
Found = dict[str, list[object]]


@pytest.fixture(scope="module")
def config(base: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    root = tmp_path_factory.mktemp("parts")
    lora, esft = write_lora(root / "lora", base), write_esft(root / "esft", base, {0: [0, 1]})
    return EngineConfig(
        model=ModelConfig(path=str(base), dtype="bfloat16", num_threads=1),
        scheduler=SchedulerConfig(layered_prefill="off"),
        cache=CacheConfig(num_pages=200),
        adapters=AdapterConfig(is_enabled=True, modules=(f"lora={lora}", f"esft={esft}")),
    )


def requests(built: BuiltEngine) -> list[GenerationRequest]:
    """One long prompt, twice for each adapter."""
    assert built.adapters is not None
    held = [None if name is None else built.adapters.acquire(name) for name in NAMES]
    params = replace(GREEDY, prompt_logprobs=None)
    return [
        GenerationRequest(
            request_id=f"{i}",
            prompt_token_ids=tuple(range(1 + i // 3, 131)),
            params=params,
            adapter=held[i % 3],
        )
        for i in range(6)
    ]


def run(config: EngineConfig, which: Sequence[int] = range(6)) -> tuple[Found, list[int]]:
    """Returns tokens and log probabilities by request, and the cached tokens of each."""
    built = build_engine(config)
    found: Found = {}
    cached: dict[str, int] = {}
    deadline = time.monotonic() + 20
    while (tier := built.engine.stats().tier) is not None and not tier.is_reading:
        assert time.monotonic() < deadline, tier.state
        time.sleep(0.005)
    for request in [requests(built)[i] for i in which]:
        built.engine.add(request)
    while built.engine.has_work:
        for delta in built.engine.step():
            assert delta.error is None, delta
            found.setdefault(delta.request_id, []).append((delta.token_ids, delta.logprobs))
            cached[delta.request_id] = delta.num_cached_tokens
    built.engine.check_integrity()
    built.engine.close()
    return found, [cached[f"{i}"] for i in which]


def test_groups_of_layers_and_micro_batches(config: EngineConfig) -> None:
    wanted, _ = run(config)
    assert len({str(wanted[f"{i}"]) for i in range(3)}) == 3
    few = replace(config.scheduler, max_batched_tokens=48)
    assert run(replace(config, scheduler=few))[0] == wanted
    layered = replace(few, layered_prefill="on")
    assert run(replace(config, scheduler=layered))[0] == wanted
    halves = PipelineConfig(micro_batches=2)
    assert run(replace(config, pipeline=halves))[0] == wanted


def test_pages_on_a_disk_are_found_by_their_own_adapter_only(
    config: EngineConfig, tmp_path: Path
) -> None:
    on_disk = replace(config, cache=replace(config.cache, disk_path=str(tmp_path / "kv")))
    wanted, _ = run(config)
    alone, _ = run(on_disk, which=[1, 4])  # of one adapter
    assert alone == {key: wanted[key] for key in ("1", "4")}
    found, cached = run(on_disk)
    assert found == wanted
    assert [count > 0 for count in cached] == [False, True, False, False, True, False]
