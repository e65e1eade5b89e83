"""The benchmarks of serving: replay of prefixes, and tracing."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path

import pytest

from serving import prefix_replay, tracing
from serving.prefix_replay import (
    TracedRequest,
    ideal_hit_rate,
    num_distinct_blocks,
    read_trace,
    replay,
)


def conversations(num_requests: int) -> list[TracedRequest]:
    """Makes conversations whose next turn repeats the earlier ones and adds one or two blocks.

    As in the real trace, a block that is not full has an id of its own.
    """
    rng = random.Random(2)
    talks: list[list[int]] = [[] for _ in range(12)]
    trace, next_id = [], 1
    for _ in range(num_requests):
        talk = rng.choice(talks)
        if len(talk) > 6:
            talk.clear()
        for _ in range(rng.randint(1, 2)):
            talk.append(next_id)
            next_id += 1
        ids = (0, *talk, 100_000 + len(trace))  # all begin with the same system prompt
        trace.append(TracedRequest(len(ids) * 512 - rng.randint(0, 511), ids))
    return trace


@pytest.mark.parametrize("num_blocks", [12, 30, 400])
def test_near_the_ideal_lru(num_blocks: int) -> None:
    trace = conversations(150)
    stats = replay(trace, num_blocks)
    assert stats.counts.num_queried_tokens == sum(request.num_tokens for request in trace)
    found = stats.counts.num_hit_tokens / stats.counts.num_queried_tokens
    assert found >= ideal_hit_rate(trace, num_blocks) - 0.02, f"{num_blocks=}, {found=}"
    assert (stats.counts.num_evicted_pages > 0) == (num_blocks < num_distinct_blocks(trace))


def test_tokens_of_blocks() -> None:
    one, two = TracedRequest(513, (4, 9)), TracedRequest(1024, (4, 8))
    assert one.token_ids() == (*range(2048, 2560), 4608)
    assert len(two.token_ids()) == 1024 and two.token_ids()[:512] == one.token_ids()[:512]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_length": 600, "hash_ids": [0, i % 2], "timestamp": 0} for i in range(2, 6)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / "trace.jsonl.xz"
    path.write_bytes(lzma.compress(content.encode()))
    assert [request.num_tokens for request in read_trace(path)] == [600] * 4
    monkeypatch.setattr("sys.argv", ["prefix_replay.py", str(path), "--blocks", "0", "2"])
    assert prefix_replay.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 requests, 2400 tokens, 2 blocks"
    assert "unlimited" in lines[2] and len(lines) == 4


def test_every_way_has_a_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However short the time is, one round runs that does not count, and one that does."""
    path = tmp_path / "new" / "tracing.json"
    few = ["--seconds", "0", "--requests", "2", "--tokens", "3", "--prompt", "4"]
    assert tracing.main([*few, "--json", str(path)]) == 0
    report = json.loads(path.read_text("utf-8"))
    assert report["figures"].keys() == tracing.WAYS.keys() and len(report["rounds"]) == 1
    assert all(each["tokens_per_s"] > 0 for each in report["figures"].values())
    assert report["figures"]["all requests"]["own_share"] > 0, "nothing was recorded"
    assert "1 rounds of 2 requests" in capsys.readouterr().out
