"""Adapters with what else decides how a step runs: groups of layers, micro-batches, a disk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_serve.adapters.bitdelta.make import make_bitdelta
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
from moe_serve.engine.routes.route_recorder import RouteRecorder
from routing_predictor.traces.recording import TracedTokens
from tests.support.adapters.adapter_folders import write_esft, write_lora
from tests.support.adapters.answers import GREEDY
from tests.support.adapters.bitdelta_folders import write_fine_tune

NAMES = (None, "lora", "esft", "bits")
COUNT = 2 * len(NAMES)
Found = dict[str, list[object]]


@pytest.fixture(scope="module")
def config(base: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    root = tmp_path_factory.mktemp("parts")
    write_lora(root / "lora", base)
    write_esft(root / "esft", base, {0: [0, 1]})
    make_bitdelta(base, write_fine_tune(root / "tuned", base), root / "bits")
    return EngineConfig(
        model=ModelConfig(path=str(base), dtype="bfloat16", num_threads=1),
        scheduler=SchedulerConfig(layered_prefill="off"),
        cache=CacheConfig(num_pages=200),
        adapters=AdapterConfig(
            is_enabled=True, modules=tuple(f"{n}={root / n}" for n in NAMES if n)
        ),
    )


def requests(built: BuiltEngine) -> list[GenerationRequest]:
    """One long prompt, twice for each adapter."""
    assert built.adapters is not None
    held = [None if name is None else built.adapters.acquire(name) for name in NAMES]
    params = replace(GREEDY, prompt_logprobs=None)
    return [
        GenerationRequest(
            request_id=f"{i}",
            prompt_token_ids=tuple(range(1 + i // len(NAMES), 131)),
            params=params,
            adapter=held[i % len(NAMES)],
        )
        for i in range(COUNT)
    ]


def run(config: EngineConfig, which: Sequence[int] = range(COUNT)) -> tuple[Found, list[int]]:
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
    assert len({str(wanted[f"{i}"]) for i in range(4)}) == 4
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
    alone, _ = run(on_disk, which=[1, 5])  # of one adapter
    assert alone == {key: wanted[key] for key in ("1", "5")}
    found, cached = run(on_disk)
    assert found == wanted
    assert [count > 0 for count in cached] == [i in (1, 5) for i in range(COUNT)]


def test_recorded_routes_name_the_adapter(config: EngineConfig) -> None:
    built, recorded = build_engine(config), list[TracedTokens]()
    sink = SimpleNamespace(add=recorded.extend)
    built.routes.add(RouteRecorder(sink, 1.0, has_weights=False))
    for request in requests(built):
        built.engine.add(request)
    while built.engine.has_work:
        built.engine.step()
    assert built.adapters is not None
    labels = {version.name: version.label for version in built.adapters.versions()}
    found = {each.request_id: each.adapter for each in recorded}
    assert found == {f"{i}": labels.get(NAMES[i % len(NAMES)] or "", "") for i in range(COUNT)}
    assert labels["bits"].startswith("bits@") and len(set(labels.values())) == 3
