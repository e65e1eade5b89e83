"""`benchmarks/run.py tracing` runs each way. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving import tracing


def test_every_way_has_a_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However short the time is: the first round does not count, and one more is made."""
    path = tmp_path / "new" / "tracing.json"
    few = ["--seconds", "0", "--requests", "2", "--tokens", "3", "--prompt", "4"]
    assert tracing.main([*few, "--json", str(path)]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert report["figures"].keys() == tracing.WAYS.keys() and len(report["rounds"]) == 1
    assert all(each["tokens_per_s"] > 0 for each in report["figures"].values())
    assert report["figures"]["all requests"]["own_share"] > 0, "nothing was recorded"
    assert "1 rounds of 2 requests" in capsys.readouterr().out
