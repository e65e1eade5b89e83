"""Statistics of several engines add up, and the flat field names of version 0.2 still work."""

from __future__ import annotations

import pytest

from moe_serve.engine.request.stats import EngineCounts, EngineLoad, EngineStats, PolicyStats

ONE = EngineStats(
    num_steps=7,
    load=EngineLoad(num_running=2, num_waiting=1, num_pages=10, num_free_pages=4, oldest_arrival=5),
    counts=EngineCounts(num_preemptions=3, num_hit_tokens=20),
    batching=PolicyStats(policy="fifo", num_passed_over=1, activated_experts=4.5, recall=0.5),
)
OTHER = EngineStats(
    num_steps=9,
    load=EngineLoad(num_waiting=4, num_pages=10, num_free_pages=10, oldest_arrival=3),
    counts=EngineCounts(num_preemptions=1, num_hit_tokens=2),
    batching=PolicyStats(policy="expert-aware", num_passed_over=2),
)


def test_engines_add_up() -> None:
    both = ONE + OTHER
    assert both.num_steps == 9, "they step together"
    assert both.load == EngineLoad(
        num_running=2, num_waiting=5, num_pages=20, num_free_pages=14, oldest_arrival=3
    )
    assert both.load.used_share == 6 / 20
    assert both.counts == EngineCounts(num_preemptions=4, num_hit_tokens=22)
    assert both.batching == PolicyStats(
        policy="fifo", num_passed_over=3, activated_experts=4.5, recall=0.5
    )
    assert sum((ONE, OTHER), EngineStats()) == both
    assert EngineStats() + EngineStats() == EngineStats()


def test_a_lost_engine_keeps_its_counts() -> None:
    lost = ONE.lost()
    assert (lost.num_steps, lost.load, lost.counts) == (7, EngineLoad(), ONE.counts)
    assert lost.batching == PolicyStats(policy="fifo", num_passed_over=1, recall=0.5)
    assert EngineStats().lost() == EngineStats()


def test_flat_names_warn() -> None:
    with pytest.deprecated_call(match=r"read stats\.load\.num_running"):
        assert ONE.num_running == 2  # type: ignore[attr-defined]
    with pytest.deprecated_call(match=r"read stats\.counts\.num_hit_tokens"):
        assert ONE.num_hit_tokens == 20  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="EngineStats has no field num_apples"):
        _ = ONE.num_apples  # type: ignore[attr-defined]
