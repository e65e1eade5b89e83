"""Experts in a slower tier: the same tokens as with all of them in memory, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layouts import Answer, colocated, config, requests, serve
from moe_serve.cluster.build import build_cluster
from moe_serve.config import EngineConfig, MemoryPolicyName
from moe_serve.engine.build import build_engine
from moe_serve.engine.request import GenerationRequest
from moe_serve.errors import ConfigError
from moe_serve.model.safetensors_file import SafetensorsFile
from thread_starter import ThreadStarter

VOCAB_SIZE, NUM_LAYERS, NUM_EXPERTS = 4096, 6, 32  # of the demonstration model
EXPERT_BYTES = 3 * 256 * 96 * 2
ALL_BYTES = NUM_LAYERS * NUM_EXPERTS * EXPERT_BYTES


def within(
    of: EngineConfig, num_bytes: int, policy: MemoryPolicyName = "predicted"
) -> EngineConfig:
    model = replace(of.model, expert_memory_bytes=num_bytes, expert_memory_policy=policy)
    return replace(of, model=model)


@pytest.fixture(scope="module")
def wanted() -> list[GenerationRequest]:
    return requests(7, VOCAB_SIZE)


@pytest.fixture(scope="module")
def resident(wanted: list[GenerationRequest]) -> dict[str, Answer]:
    return colocated(config(0, 0), wanted)


@pytest.mark.parametrize("policy", ["lru", "predicted"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_one_process(
    share: float,
    policy: MemoryPolicyName,
    wanted: list[GenerationRequest],
    resident: dict[str, Answer],
) -> None:
    of = within(config(0, 0, 1), int(ALL_BYTES * share), policy)
    engine = build_engine(of).engine
    assert serve(engine, wanted) == resident, f"{policy}, {share:.0%} of the experts"
    stats = engine.stats().expert_memory
    assert stats is not None and 0 < stats.num_reads < stats.num_needed * 2, f"{stats}"
    assert stats.resident_bytes <= ALL_BYTES * share, f"{stats}"


@pytest.mark.parametrize("experts", [1, 2])
def test_ranks(experts: int, wanted: list[GenerationRequest], resident: dict[str, Answer]) -> None:
    """And the ranks' counts come together."""
    of = within(config(1, experts), ALL_BYTES // 2 // experts)
    engine = build_cluster(of, make_starter=ThreadStarter).engine
    try:
        assert serve(engine, wanted) == resident
        stats = engine.stats().expert_memory
        assert stats is not None and stats.num_needed > stats.num_hits > 0, f"{stats}"
        assert ALL_BYTES * 0.4 < stats.budget_bytes <= ALL_BYTES // 2, f"{stats}"
    finally:
        engine.close()


def test_an_expert_that_cannot_be_read_fails_a_step(
    wanted: list[GenerationRequest], resident: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: requests of that step end with an error that names the tensor; later ones
    are served."""
    name = "model.layers.3.mlp.experts.7.up_proj.weight"
    read, calls = SafetensorsFile._read_into, []

    def failing(file: SafetensorsFile, target: memoryview, begin: int) -> None:
        if file.headers[name].begin == begin and not calls:
            calls.append(begin)
            raise OSError(5, "Input/output error")
        read(file, target, begin)

    monkeypatch.setattr(SafetensorsFile, "_read_into", failing)
    engine = build_engine(within(config(0, 0, 1), ALL_BYTES // 2, "lru")).engine
    failed = serve(engine, wanted)
    errors = {answer.error for answer in failed.values() if answer.error is not None}
    assert calls and errors, "a step failed"
    assert serve(engine, wanted) == resident


def test_too_little_memory_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"is 200000, but an expert takes 147456 bytes.*294912"):
        build_engine(within(config(0, 0, 1), 200_000))
