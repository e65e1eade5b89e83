"""The benchmarks `expert_memory` and `replica_choice` run and count what they claim to count."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from expert_memory import expert_memory, replica_choice
from expert_memory.expert_memory import Tier
from expert_memory.rounds import draw
from moe_serve.model.checkpoint.checkpoint import demo_model_folder


def test_policies_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    policies = ("lru", "frequency", "prefetch", "next-layer")
    few = ["--rounds", "1", "--batches", "3", "--prompt", "8", "--tokens", "4"]
    few += ["--policies", *policies]
    told = ["--predictor", str(demo_model_folder() / "predictor")]
    assert expert_memory.main([*few, *told, "--latency-us", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))
    assert found["tier"].startswith("1 us a tensor"), found["tier"]
    outcomes = {each["name"]: each for each in found["batch 3"]}
    lru, *others = policies
    told_too = [name for policy in others for name in (policy, f"{policy}, told")]
    assert list(outcomes) == ["all resident", lru, *told_too]
    assert outcomes["all resident"]["hit_rate"]["mean"] == 1.0
    assert outcomes["lru"]["over_first"]["mean"] == 1.0
    assert all(0 <= each["row_hit_rate"]["mean"] <= 1 for each in outcomes.values()), outcomes
    assert outcomes["prefetch"]["read_over_untold"] is None
    assert outcomes["frequency, told"]["read_over_untold"]["mean"] > 0
    assert outcomes["lru"]["prefetched"] == outcomes["frequency"]["prefetched"] == 0
    assert "3 requests; experts read from: 1 us a tensor" in capsys.readouterr().out


def test_replicas_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "replicas.json"
    few = ["--prompts", "4", "--draws", "2", "--rows", "4", "--extra", "2", "--json", str(file)]
    assert replica_choice.main(few) == 0
    found = json.loads(file.read_text("utf-8"))["found"]
    assert [each["policy"] for each in found] == list(replica_choice.POLICIES)


def test_prompts_take_the_domains_by_turns() -> None:
    pieces = draw([[1] * 9, [2] * 9], 5, 4, seed=0)
    assert pieces == [(1,) * 4, (2,) * 4, (1,) * 4, (2,) * 4, (1,) * 4]


def test_a_slow_tier_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    Tier(latency_s=1e-3, bytes_per_s=1e6).wait(2000)
    Tier().wait(2000)
    assert waits == [pytest.approx(3e-3)], waits
