"""Service tiers of a workload: the file, the columns of a trace, and the tiers that are drawn."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from moe_serve.bench.workload.tier_mix import TierMix, read_tier_mix
from moe_serve.bench.workload.trace_rows import Trace, TraceRow, read_trace
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.config.tiers import TierConfig
from moe_serve.errors import BenchError, MoeServeError

FILE = """
tiers:
  interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1}
  flex: {weight: 1, e2e_s: 600, sheddable: true}
shares: {interactive: 3, flex: 1}
priorities: {flex: 12}
"""


def mix(folder: Path, text: str = FILE) -> TierMix:
    path = folder / "tiers.yaml"
    path.write_text(text, "utf-8")
    return read_tier_mix(path)


def workload(seed: int, tiers: TierMix | None, num: int = 4000) -> Workload:
    one = Lengths(low=1, high=1)
    return Workload(
        seed=seed,
        concurrency=1,
        prompt_tokens=one,
        output_tokens=one,
        num_requests=num,
        tiers=tiers,
    )


def test_a_file_of_tiers(tmp_path: Path) -> None:
    found = mix(tmp_path)
    assert found.tiers[0] == TierConfig(name="interactive", weight=4.0, ttft_s=1.0, tpot_s=0.1)
    assert found.tiers[1] == TierConfig(name="flex", e2e_s=600.0, is_sheddable=True)
    assert found.shares == (0.75, 0.25)
    assert [found.priority_of(name) for name in ("interactive", "flex")] == [0, 12]
    assert mix(tmp_path, "tiers: {a: {}, b: {ttft_s: 1}}").shares == (0.5, 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tiers: {}", "has no tiers"),
        ("[1, 2]", "must have tiers"),
        ("tiers: {a: {}}\nmore: 1", "must have tiers, and may have shares"),
        ("tiers: {a: {ttft_s: -1}}", "ttft_s cannot be -1"),
        ("tiers: {a: {}}\nshares: {b: 1}", "shares has a tier 'b'; the tiers are a"),
        ("tiers: {a: {}}\nshares: {a: -1}", "the share of tier 'a' must be 0 or more, got -1"),
        ("tiers: {a: {}}\nshares: {a: 0}", "shares must have a number above 0"),
        ("tiers: {a: {}}\nshares: {a: .nan}", "a must be a number, got nan"),
        ("tiers: {a: {}}\npriorities: {a: 1.5}", "a must be a number, got 1.5"),
        ("tiers: {a: {", "is not YAML"),
    ],
)
def test_mistakes_of_a_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(MoeServeError, match=said):
        mix(tmp_path, text)


def test_tiers_are_drawn_by_their_shares_and_the_seed(tmp_path: Path) -> None:
    tiers = mix(tmp_path)
    names = [slot.tier for slot in workload(1, tiers).slots()]
    assert names == [slot.tier for slot in workload(1, tiers).slots()]
    assert names != [slot.tier for slot in workload(2, tiers).slots()]
    assert Counter(names)["flex"] == pytest.approx(1000, abs=120)
    assert {slot.tier for slot in workload(1, None, 9).slots()} == {""}


def test_the_same_request_has_the_same_tier_in_a_shorter_run(tmp_path: Path) -> None:
    tiers = mix(tmp_path)
    long, short = workload(1, tiers, 50), workload(1, tiers, 20)
    assert [s.tier for s in long.slots()][:20] == [s.tier for s in short.slots()]


def test_rows_keep_their_own_tier(tmp_path: Path) -> None:
    rows = tuple(
        TraceRow(at_s=float(i), prompt_tokens=5, output_tokens=2, tier=tier, tenant=f"t{i}")
        for i, tier in enumerate(["flex", "", "flex", "interactive"] * 5)
    )
    found = list(Workload(seed=0, trace=Trace(rows=rows), tiers=mix(tmp_path)).slots())
    assert [slot.tier for slot in found][::4] == ["flex"] * 5
    assert found[3].tier == "interactive" and found[7].tenant == "t7"
    assert all(slot.tier for slot in found)
    unknown = Trace(rows=(TraceRow(at_s=0.0, prompt_tokens=5, output_tokens=2, tier="gold"),))
    with pytest.raises(BenchError, match="has tier 'gold'; the tiers are interactive, flex"):
        list(Workload(seed=0, trace=unknown, tiers=mix(tmp_path)).slots())


def test_columns_of_a_csv_trace(tmp_path: Path) -> None:
    """The VTC arena's file has a column `client`; ours may have all three."""
    path = tmp_path / "trace.csv"
    path.write_text("t,client,input_length,output_length\n0.5,13,10,20\n1,2,30,5\n", "utf-8")
    assert [row.tenant for row in read_trace(path).rows] == ["13", "2"]
    path.write_text(
        "at_s,prompt_tokens,output_tokens,tenant,tier,session\n0,10,20,acme,flex,s1\n", "utf-8"
    )
    row = read_trace(path).rows[0]
    assert (row.tenant, row.tier, row.session) == ("acme", "flex", "s1")


def test_fields_of_a_json_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"at_s": 0, "prompt_tokens": 3, "output_tokens": 2, "tenant": 7, "session_id": "a"}
    path.write_text(json.dumps(line) + "\n", "utf-8")
    row = read_trace(path).rows[0]
    assert (row.tenant, row.tier, row.session) == ("7", "", "a")
    for wrong in ({"tenant": ["x"]}, {"tier": "t" * 300}):
        path.write_text(json.dumps(line | wrong) + "\n", "utf-8")
        with pytest.raises(BenchError, match="line 1 of .* is not a request"):
            read_trace(path)
