"""The benchmarks `pingpong` and `ahead` run and count what they claim. No timing is asserted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import two_hosts
from moe_serve.planning import measured_model
from pingpong import ahead, pingpong, way
from pingpong.deepspeed_layer import time_deepspeed
from pingpong.job import StepMarks
from pingpong.points import point, stage_times

TINY = [
    "--no-pin", "--num-layers", "2", "--width", "64", "--num-heads", "2", "--num-kv-heads", "1",
    "--head-dim", "32", "--expert-width", "64", "--vocab-size", "128", "--batch", "12",
    "--context", "16", "--rounds", "1", "--delays", "0.5",
]  # fmt: skip
MS = 1_000_000


@pytest.mark.timeout(400)
def test_ablation_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_model, "_CACHE_BYTES", 2**24)  # of 1 GB, which are zeroed
    path = tmp_path / "pair.json"
    some = ["--parts", "ablation", "calibration", "--quick", "--delay-by", "transport"]
    threads = torch.get_num_threads()
    try:
        assert pingpong.main([*TINY, *some, "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(path.read_text("utf-8"))
    assert [each["num_micro_batches"] for each in report["expected"]] == [1, 2, 3, 4]
    assert all(each["expected_s"] > 0 for each in report["expected"])
    found = report["ablation"]
    assert [p["num_micro_batches"] for p in found["cut"]] == 2 * [1, 2, 3, 4], found["cut"]
    assert [p["rows"] for p in found["cut"][:4]] == [12, 6, 4, 3], "the batch is not cut evenly"
    assert [p["rows"] for p in found["grown"][:4]] == 4 * [4], "micro-batches of other sizes"
    assert all(p["step_s"] > 0 for p in [*found["cut"], *found["grown"]]), "a step took no time"
    printed = capsys.readouterr().out
    assert "m = 2 over m = 1" in printed and "of moe-serve calibrate's" in printed, "no verdicts"
    with pytest.raises(SystemExit):
        pingpong.main([*TINY, "--parts", "calibration"])
    assert "give both to --parts" in capsys.readouterr().err


@pytest.mark.timeout(400)
@pytest.mark.skipif(two_hosts.why_not() is not None, reason=two_hosts.why_not() or "")
def test_delays_of_the_kernel_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two namespaces with gloo between them. Only tc has a stand-in, because few kernels have
    netem."""
    asked: list[tuple[str, float]] = []

    def set_delay(host: two_hosts.VirtualHost, seconds: float) -> object:
        assert host.run("ip", "link", "show", host.device).returncode == 0, "no such device"
        asked.append((host.address, seconds))
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(way, "set_delay", set_delay)
    path = tmp_path / "pair.json"
    some = ["--parts", "ablation", "--delay-by", "netem", "--json", str(path)]
    assert pingpong.main([*TINY, *some]) == 0
    found = json.loads(path.read_text("utf-8"))["ablation"]
    assert found["delayed_by"] == "tc netem, gloo"
    (delay_s,) = {p["delay_s"] for p in found["cut"]} - {0.0}
    assert [p["delay_s"] for p in found["cut"]] == 4 * [0.0] + 4 * [delay_s], "not both ways"
    assert {host for host, _ in asked} == {"198.18.0.1", "198.18.0.2"}, "a direction is not delayed"
    assert {s for _, s in asked} == {1e-3, 0.0, delay_s}, "the probe, and each series"


def test_what_tc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    host = two_hosts.VirtualHost(name="ns", node=0, address="198.18.0.1", device="end")

    def run(argv: tuple[str, ...], **_: object) -> None:
        calls.append(argv)

    monkeypatch.setattr(subprocess, "run", run)
    way.set_delay(host, 0.00041)
    told = "ip netns exec ns tc qdisc replace dev end root netem delay 410us limit 1000000"
    assert calls == [tuple(told.split())]


def test_where_the_kernel_cannot_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert way.why_no_cable() == "network namespaces need root"
    with pytest.raises(SystemExit, match=r"cannot be real here: .* need root; or --delay-by"):
        pingpong.main([*TINY, "--parts", "ablation", "--delay-by", "netem"])


@pytest.mark.timeout(400)
def test_steps_ahead_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The benchmark itself compares the tokens."""
    path = tmp_path / "ahead.json"
    few = ["--sequences", "3", "--micro-batches", "2", "--runs", "2", "--steps", "4"]
    assert ahead.main([*few, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text("utf-8"))["rows"]
    assert (row["num_micro_batches"], row["num_sequences"]) == (2, 3)
    assert row["without_ms"] > 0 and row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert "ahead over without" in capsys.readouterr().out


def test_deepspeed_that_is_not_there() -> None:
    times = time_deepspeed({}, 6, "python-that-is-not-there", None)
    assert times.missing is not None and "not installed" in times.missing, times


def one_step(end: int) -> tuple[StepMarks, StepMarks]:
    """Two layers with T_a 3 ms, T_e 2 ms, T_c 1 ms: sent at 3, received at 4, sent at 6, back at
    7."""
    ours = StepMarks(start=0, end=end, whole_end=end, received=[7 * MS, 14 * MS],
                     sent=[3 * MS, 10 * MS])  # fmt: skip
    theirs = StepMarks(start=0, end=end, whole_end=end, received=[4 * MS, 11 * MS],
                       sent=[6 * MS, 13 * MS])  # fmt: skip
    return ours, theirs


def test_stage_times() -> None:
    times = stage_times(8, [one_step(14 * MS)])
    assert times.attention_s == pytest.approx(3e-3), times
    assert times.experts_s == pytest.approx(2e-3), times
    assert times.transfer_s == pytest.approx(1e-3), times


@pytest.mark.parametrize(
    ("m", "formula_ms", "model_ms", "is_full"),
    [(1, 7 + 3, 2 * 7, False), (2, 7 + 3 * 3, 7 + 7 + 3, False), (3, 7 + 3 * 5, 9 + 7 + 6, True)],
)
def test_what_the_formulas_say(m: int, formula_ms: int, model_ms: int, is_full: bool) -> None:
    seen = [one_step(14 * MS)]
    found = point(seen, stage_times(8, seen), 2, m, 0.0)
    assert found.formula_s == pytest.approx(1e-3 * formula_ms), found
    assert found.model_s == pytest.approx(1e-3 * model_ms), found
    assert found.is_full == is_full, found
    assert found.step_s == pytest.approx(14e-3), found
