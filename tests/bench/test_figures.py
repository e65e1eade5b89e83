"""From records to figures: percentiles, goodput, time series, notes, comparisons."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.bench.client.load_client import ClientHealth
from moe_serve.bench.client.server_metrics import Metrics, ServerSide
from moe_serve.bench.figures.request_record import RunTimeline
from moe_serve.bench.figures.summary import (
    Goodput,
    Samples,
    Slo,
    Spread,
    notes_of,
    quantiles_ms,
    summarize,
)
from moe_serve.bench.report.compare import change_intervals, compare, differing_settings
from moe_serve.errors import BenchError
from tests.support.bench.records import record, report


class TestSpread:
    @given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50))
    def test_is_numpys(self, values: list[float]) -> None:
        spread = Spread.of(values)
        assert spread is not None
        expected = np.percentile(np.array(values) * 1e3, [50, 90, 95, 99])
        assert [spread.p50, spread.p90, spread.p95, spread.p99] == list(expected)
        assert (spread.num, spread.max) == (len(values), max(values) * 1e3)
        assert quantiles_ms(values)[100] == pytest.approx(spread.p50, abs=1e-3)

    def test_by_hand(self) -> None:
        spread = Spread.of([i / 1000 for i in range(101)])
        assert spread is not None
        assert (spread.mean, spread.p50, spread.p99) == pytest.approx((50.0, 50.0, 99.0))

    def test_of_nothing(self) -> None:
        assert Spread.of([]) is None and quantiles_ms([]) == []


class TestSamples:
    def test_from_due_and_from_start(self) -> None:
        records = [record(scheduled_s=1.0, started_s=1.5, first_s=2.0, end_s=4.0)]
        due, sent = Samples.of(records), Samples.of(records, is_from_start=True)
        assert (due.ttft_R.tolist(), due.e2e_R.tolist()) == ([1.0], [3.0])
        assert (sent.ttft_R.tolist(), sent.e2e_R.tolist()) == ([0.5], [2.5])

    def test_gaps_are_shared_among_their_tokens(self) -> None:
        one = record(gaps_s=array("d", [0.3, 0.8]), gap_tokens=array("L", [1, 4]))
        other = record(gaps_s=array("d", [0.5]))
        itl = Samples.of([one, other, record(error="timeout")]).itl_G
        assert itl.tolist() == pytest.approx([0.3, 0.2, 0.2, 0.2, 0.2, 0.5])


class TestGoodput:
    def test_parse(self) -> None:
        slo = Slo.parse("ttft=500ms, tpot=0.05s")
        assert slo == Slo(ttft_s=0.5, tpot_s=0.05) and str(slo) == "ttft 500 ms, tpot 50 ms"

    @pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "x=1s", "ttft=1s,ttft=2s", "e2e=-1s"])
    def test_refused(self, text: str) -> None:
        with pytest.raises(BenchError, match="--slo must be ttft=500ms"):
            Slo.parse(text)

    def test_counts_what_failed_and_what_was_late(self) -> None:
        slo = Slo.parse("ttft=1s,tpot=100ms,e2e=3s")
        records = [
            record(first_s=1.0, end_s=3.0),  # at the limits
            record(first_s=1.1, end_s=2.0),
            record(scheduled_s=0.0, started_s=0.9, first_s=1.5, end_s=2.0),  # the client's delay
            record(first_s=0.5, last_s=1.7, end_s=2.0, gaps_s=array("d", [1.2]), output_tokens=3),
            record(first_s=0.5, end_s=2.0, error="HTTP 500"),
        ]
        good = Goodput.of(slo, records, duration_s=4.0)
        assert (good.num_good, good.share, good.requests_per_s) == (1, 0.2, 0.25)


class TestSummary:
    def test_totals(self) -> None:
        records = [
            record(prompt_tokens=10, output_tokens=4, cached_tokens=5, wanted_tokens=4, end_s=2.0),
            record(prompt_tokens=30, output_tokens=6, cached_tokens=0, wanted_tokens=6, end_s=5.0),
            record(error="HTTP 429", detail="full", end_s=4.0),
            record(error="HTTP 429", detail="full again", end_s=4.0),
        ]
        s = summarize(records, num_unfinished=1, peak_in_flight=3)
        assert (s.duration_s, s.num_ok, s.num_failed, s.num_unfinished) == (5.0, 2, 2, 1)
        assert (s.requests_per_s, s.input_tok_s, s.output_tok_s) == (0.4, 8.0, 2.0)
        assert (s.error_rate, s.cached_share, s.has_usage) == (0.5, 0.125, True)
        assert (s.errors, s.error_examples) == ({"HTTP 429": 2}, {"HTTP 429": "full"})

    def test_of_nothing(self) -> None:
        s = summarize([])
        assert (s.requests_per_s, s.error_rate, s.ttft_ms, s.cached_share) == (0.0, 0.0, None, None)

    def test_notes(self) -> None:
        def notes(**fields: object) -> list[str]:
            summary = summarize([record(**fields) for _ in range(2)])
            return notes_of(summary, shares_prompts=False, ignores_eos=False)

        plain = {"output_tokens": 2, "wanted_tokens": 2, "gaps_s": array("d", [0.1])}
        assert notes(**plain) == []
        assert "no usage" in notes(**plain | {"output_tokens": None})[0]
        assert "3.00 tokens: ITL" in notes(**plain | {"output_tokens": 6})[0]
        assert "50% of the tokens" in notes(**plain | {"wanted_tokens": 4})[0]
        cached = plain | {"prompt_tokens": 100, "cached_tokens": 50}
        assert "take another --seed" in notes(**cached)[0]
        assert notes(**cached | {"cached_tokens": 6}) == [], "by chance"

    def test_a_slow_client_says_so(self) -> None:
        quick = ClientHealth(cpu=0.2, loop_lag=Spread.of([0.001]), lateness=None)
        assert quick.warnings() == []
        late = replace(quick, cpu=0.97, lateness=Spread.of([0.2]))
        text = late.warnings()[0]
        assert "97% of a core" in text and "200 ms late" in text, text


def test_timeline_by_hand() -> None:
    """Two requests in [0, 1) and [0.5, 2); tokens at 0.25 and 0.75, and at 1.5."""
    records = [
        record(started_s=0.0, first_s=0.25, end_s=1.0, gaps_s=array("d", [0.5]), output_tokens=4),
        record(started_s=0.5, first_s=None, end_s=1.5, output_tokens=3, error="timeout"),
    ]
    line = RunTimeline.of(records, duration_s=1.5)
    bins = 5  # of 0.1 s in half a second
    assert line.bin_s == pytest.approx(0.1)
    assert np.array(line.in_flight_B).reshape(-1, bins).mean(1) == pytest.approx([1, 2, 1])
    tokens = np.array(line.output_tok_s_B) * line.bin_s
    assert tokens.reshape(-1, bins).sum(1) == pytest.approx([2, 2, 3])
    assert (sum(line.sent_B), line.sent_B[0], line.failed_B[-1]) == (2, 1, 1)


def test_the_last_end_is_on_the_timeline() -> None:
    """The rounded length of 300 bins ends a little before the run does."""
    end = 30.12991495747874
    assert 300 * (end / 300) < end
    line = RunTimeline.of([record(first_s=None, end_s=end, error="timeout")], end)
    assert sum(line.failed_B) == 1


class TestCompare:
    def test_rows(self) -> None:
        slow = [record(index=i, first_s=2.0 + i / 100, end_s=5.0) for i in range(30)]
        fast = [record(index=i, first_s=1.0 + i / 100, end_s=5.0) for i in range(30)]
        rows = {row.label: row for row in compare(report(slow), report(fast))}
        row = rows["TTFT p50"]
        assert (row.a, row.b) == pytest.approx((2145.0, 1145.0))
        assert row.change == pytest.approx(1145 / 2145 - 1)
        assert row.interval is not None and row.interval[0] < row.change < row.interval[1] < 0
        assert row.verdict == "better"
        assert rows["end to end p50"].verdict == "", "they are the same"
        assert rows["requests/s"].interval is None

    def test_without_requests_there_are_no_intervals(self) -> None:
        bare = replace(report([record()]), records=())
        rows = compare(bare, report([record()]))
        assert rows and all(row.interval is None and row.verdict == "" for row in rows)

    def test_an_interval_holds_the_truth_and_shrinks(self) -> None:
        """B has exponential latencies that are a fifth longer. Most of 40 intervals of 95% hold
        0.2."""
        rng = np.random.default_rng(5)

        def intervals_of(num: int) -> dict[str, tuple[float, float]]:
            a, b = rng.exponential(1.0, (num, 1)), rng.exponential(1.2, (num, 1))
            return change_intervals(list(a), list(b), rng)

        few = [intervals_of(50)["mean"] for _ in range(40)]
        assert sum(low <= 0.2 <= high for low, high in few) >= 33
        low, high = intervals_of(1000)["p50"]
        assert high - low < 0.4

    def test_values_of_a_request_stay_together(self) -> None:
        """Requests with a thousand equal gaps give as wide an interval as requests with one gap."""
        rng = np.random.default_rng(5)
        a, b = rng.exponential(1.0, 30), rng.exponential(1.0, 30)
        single = change_intervals([v[None] for v in a], [v[None] for v in b], rng)
        many = change_intervals([np.full(9, v) for v in a], [np.full(9, v) for v in b], rng)
        for name, (low, high) in single.items():
            assert many[name][1] - many[name][0] == pytest.approx(high - low, rel=0.3), name

    def test_events_are_not_compared_with_tokens(self) -> None:
        a, b = report([record(output_tokens=8)]), report([record(output_tokens=None)])
        assert differing_settings(a, a) == [] == differing_settings(b, b)
        (said,) = differing_settings(a, b)
        assert said.startswith("output and TPOT count different things: tokens, events")

    def test_what_differs(self) -> None:
        a = report([record()])
        b = replace(a, model="other", workload={**a.workload, "seed": 9})
        assert differing_settings(a, b) == ["model: m, other", "seed: 1, 9"]


PAGE = """# HELP moe_serve:engine_steps_total Steps.
# TYPE moe_serve:engine_steps_total counter
moe_serve:engine_steps_total{model_name="a}b,\\"c"} 10.0
moe_serve:generation_tokens_total{model_name="m"} 100.0
moe_serve:prompt_tokens_total{model_name="m"} 50.0
moe_serve:prefix_cache_queries_total{model_name="m"} 60.0
moe_serve:prefix_cache_hits_total{model_name="m"} 0.0
moe_serve:num_preemptions_total{model_name="m"} 1.0
moe_serve:placement_version{model_name="m"} 2.0
moe_serve:pipeline_steps_total{micro_batches="1",model_name="m",reason="small"} 10.0
vllm:engine_steps_total 7
nonsense
"""
LATER = """moe_serve:engine_steps_total{model_name="a}b,\\"c"} 30.0
moe_serve:generation_tokens_total{model_name="m"} 400.0
moe_serve:prompt_tokens_total{model_name="m"} 150.0
moe_serve:prefix_cache_queries_total{model_name="m"} 160.0
moe_serve:prefix_cache_hits_total{model_name="m"} 25.0
moe_serve:num_preemptions_total{model_name="m"} 3.0
moe_serve:placement_version{model_name="m"} 3.0
moe_serve:expert_memory_needed_total{model_name="m"} 800.0
moe_serve:expert_memory_hits_total{model_name="m"} 600.0
moe_serve:pipeline_steps_total{micro_batches="1",model_name="m",reason="small"} 15.0
moe_serve:pipeline_steps_total{micro_batches="2",model_name="m",reason="a"} 10.0
moe_serve:pipeline_steps_total{micro_batches="2",model_name="m",reason="b"} 5.0
moe_serve:activated_experts_predicted{model_name="m"} NaN
moe_serve:tier_runaways_total{model_name="m",tier="chat"} 4.0
moe_serve:tier_runaways_total{model_name="m",tier="flex"} 0.0
"""


class TestServerMetrics:
    def test_differences(self) -> None:
        side = ServerSide.between(Metrics.parse(PAGE), Metrics.parse(LATER))
        assert side == ServerSide(
            num_steps=20.0,
            tokens_per_step=20.0,
            prefix_hit_rate=0.25,
            num_preemptions=2.0,
            experts_needed_per_step=40.0,
            expert_hit_rate=0.75,
            predicted_experts_per_step=None,
            placement_switches=1.0,
            steps_by_micro_batches={"1": 5.0, "2": 15.0},
            runaways={"chat": 4.0},
        )

    @pytest.mark.parametrize("page", ["", "vllm:engine_steps_total 7\n", "<html>"])
    def test_of_another_server_nothing_is_said(self, page: str) -> None:
        assert ServerSide.between(Metrics.parse(page), Metrics.parse(page)) is None
