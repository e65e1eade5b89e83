"""A short run of `benchmarks/run.py fault_soak`: its own figures are what is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soak import fault_soak


@pytest.mark.timeout(600)  # soaks for 8 s, and starts processes seven times over
def test_random_kills_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three kills within seconds of each other: nothing hangs, leaks, fails or is wrong."""
    report = tmp_path / "soak.json"
    arguments = [
        "fault_soak", "--minutes", "0.13",
        "--kills", "3", "--seed", "11", "--attention-ranks", "2", "--expert-ranks", "2",
        "--clients", "4", "--questions", "8", "--heartbeat", "0.5", "--json", str(report),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", arguments)
    assert fault_soak.main() == 0, capsys.readouterr().out
    figures = json.loads(report.read_text("utf-8"))
    assert figures["num_wrong"] == figures["num_failed"] == 0
    assert len(figures["blows"]) == 3 and figures["num_answers"] > 0
    assert figures["num_losses_logged"] >= 3, "the ranks were hurt"
