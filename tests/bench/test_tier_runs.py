"""`bench --tiers`: the requests of each tier, the report, and the comparison of two runs."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_serve.bench.bench_run import run_bench
from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.figures.tier_figures import ServiceFigures
from moe_serve.bench.load import own_fields
from moe_serve.bench.report.compare import compare
from moe_serve.bench.report.html_page import write_page
from moe_serve.bench.report.report import Report, read_report
from moe_serve.bench.workload.prompt_maker import Slot
from moe_serve.bench.workload.tier_mix import TierMix
from moe_serve.bench.workload.trace_rows import Trace, TraceRow
from moe_serve.bench.workload.workload import Lengths, Workload
from moe_serve.cli.bench.bench import _is_bad
from moe_serve.cli.main import main
from moe_serve.config.tiers import TierConfig
from tests.support.bench.fake_openai import FakeServer, Reply, counted_words, http, running
from tests.support.bench.records import record, report

CHAT = TierConfig(name="chat", weight=4.0, ttft_s=1.5)
FLEX = TierConfig(name="flex", e2e_s=60.0, is_sheddable=True)
MIX = TierMix.of((CHAT, FLEX), {"chat": 3, "flex": 1}, {"flex": 7})
FULL = json.dumps({"error": {"code": "deadline_unmeetable", "message": "too late"}}).encode()


def answer(path: str, body: Mapping[str, Any]) -> Reply:
    """Refuses the flex tier, as a full server does."""
    if body.get("service_tier") == "flex":
        return Reply([http(429, FULL)])
    return counted_words(path, body)


def run(**workload: Any) -> tuple[Report, list[Mapping[str, Any]]]:
    """Returns the report of a run and the bodies of its requests, without those of the probe."""

    async def start() -> tuple[Report, list[Mapping[str, Any]]]:
        async with FakeServer(answer) as server:
            fields = {"seed": 1, "output_tokens": Lengths(low=3, high=3), "tiers": MIX} | workload
            found = await run_bench(
                RunPlan(
                    url=server.url,
                    workload=Workload(**fields),
                    endpoint=Endpoint(name="completions", model="m"),
                    num_warm_up=0,
                )
            )
            return found, [body for body in server.bodies if "service_tier" in body]

    return asyncio.run(start())


def test_tiers_are_drawn_by_their_shares_and_sent() -> None:
    found, bodies = run(concurrency=2, num_requests=40)
    sent = Counter(body["service_tier"] for body in bodies)
    assert sent["chat"] + sent["flex"] == 40 and 20 < sent["chat"] < 38
    assert {body.get("priority") for body in bodies if body["service_tier"] == "flex"} == {7}
    assert not any("priority" in body for body in bodies if body["service_tier"] == "chat")
    again = Counter(body["service_tier"] for body in run(concurrency=2, num_requests=40)[1])
    assert again == sent, "the same seed draws the same tiers"
    assert found.service is not None
    chat, flex = found.service.tiers
    assert (chat.num, chat.num_refused, chat.attained) == (sent["chat"], 0, 1.0)
    assert (flex.num, flex.num_refused, flex.num_failed) == (sent["flex"], sent["flex"], 0)
    assert found.workload["tiers"]["flex"]["share"] == 0.25
    assert not _is_bad(found, 0.0), "a refusal is an answer"


def test_a_trace_keeps_its_own_tiers_and_tenants() -> None:
    rows = [
        TraceRow(at_s=0.0, prompt_tokens=4, output_tokens=2, tier="flex", tenant="acme"),
        TraceRow(at_s=0.0, prompt_tokens=4, output_tokens=2, tier="chat"),
    ]
    found, bodies = run(trace=Trace(rows=tuple(rows), num_skipped=0))
    assert [(body["service_tier"], body.get("user")) for body in bodies] == [
        ("flex", "acme"),
        ("chat", None),
    ]
    assert {r.tenant for r in found.records} == {"acme", ""}


def test_without_tiers_nothing_is_added_to_a_request() -> None:
    slot = Slot(index=0, at_s=0.0, prompt_tokens=1, output_tokens=1, tier="chat", tenant="acme")
    assert own_fields(slot, None) == {}
    assert own_fields(slot, MIX) == {"service_tier": "chat", "user": "acme"}


def test_a_run_that_only_failed_is_bad() -> None:
    broken = report([record(error="HTTP 500", first_s=None, tier="chat")])
    assert _is_bad(broken, 0.0)


def tiered(ttfts: list[float], refused: int = 0) -> Report:
    """Makes a report of answers and refusals of tier chat with these times to the first token."""
    rows = [
        record(index=i, first_s=ttft, end_s=ttft + 1.0, tier="chat") for i, ttft in enumerate(ttfts)
    ]
    rows += [record(first_s=None, error="deadline_unmeetable", tier="flex") for _ in range(refused)]
    workload = {"mode": "closed", "is_open": False, "seed": 1, "tiers": MIX.facts()}
    return report(rows, workload=workload, service=ServiceFigures.of(rows, MIX.tiers, 10.0))


def test_two_runs_are_compared_by_tier() -> None:
    fast, slow = [0.5 + i / 1000 for i in range(40)], [2.0 + i / 1000 for i in range(40)]
    rows = {row.label: row for row in compare(tiered(fast + slow), tiered(fast, refused=3))}
    met = rows["chat: met ttft 1500 ms"]
    assert (met.a, met.b, met.verdict) == (50.0, 100.0, "better")
    assert (rows["refused"].a, rows["refused"].b) == (0, 3)
    assert rows["chat: TTFT p99"].verdict == "better"
    late = rows["weighted tardiness, s"]
    assert late.a is not None and late.a > 1.0 and late.b == 0.0
    assert not any("tardiness" in row.label for row in compare(tiered(fast), report([record()])))


def test_only_what_might_have_been_refused_is_a_promise() -> None:
    def promises(**options: bool) -> tuple[int, int]:
        tiers = {"chat": CHAT, "flex": TierConfig(name="flex", ttft_s=1.5, is_sheddable=True)}
        rows = [
            record(first_s=ttft, end_s=9.0, tier=tier, predicted_ttft_s=1.0)
            for tier in tiers
            for ttft in (1.0, 2.0, 3.0)
        ]
        found = ServiceFigures.of(rows, list(tiers.values()), 1.0, **options)
        return found.num_promised, found.num_kept

    assert promises() == (3, 1), "the sheddable tier's"
    assert promises(is_strict=True) == (6, 2)


def test_the_page_has_a_table_of_the_tiers(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", [tiered([0.5] * 5, refused=3)])
    page = (tmp_path / "page.html").read_text()
    assert "<th>chat, weight 4, ttft 1500 ms</th><td>5</td><td>0</td><td>100.0%</td>" in page
    assert (
        "<th>flex, weight 1, e2e 60000 ms</th><td>3</td><td>3</td><td>0.0%</td><td>-</td>" in page
    )


def ended(arguments: list[str]) -> object:
    """Runs the command and returns its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_the_command_reads_a_file_of_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = tmp_path / "tiers.yaml"
    tiers.write_text("tiers: {chat: {ttft_s: 9}, flex: {e2e_s: 60, sheddable: true}}\n")
    out = tmp_path / "report.json"
    with running(FakeServer(answer)) as server:
        options = ["--concurrency", "2", "--requests", "12", "--seed", "1", "--warmup", "0"]
        arguments = ["bench", "--url", server.url, "--tiers", str(tiers), "--json", str(out)]
        assert ended(arguments + options) == 0
    found = read_report(out)
    assert found.service is not None
    assert [tier.name for tier in found.service.tiers] == ["chat", "flex"]
    shown = capsys.readouterr().out
    assert "chat, weight 1" in shown and "requests refused" in shown
    tiers.write_text("tiers: {chat: {tft_s: 9}}\n")
    assert ended(["bench", "--url", "http://x:1", "--tiers", str(tiers), "--rate", "1"]) == 2
    assert "did you mean ttft_s?" in capsys.readouterr().err
