"""The files that a benchmark writes: the JSON file, the page and its pictures."""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from moe_serve.bench.client.load_client import RunProgress
from moe_serve.bench.client.server_metrics import Metrics, ServerSide
from moe_serve.bench.figures.summary import Slo, summarize
from moe_serve.bench.report.html_page import render
from moe_serve.bench.report.plot import Axis, PlotLine, nice_step, plot, tick_label
from moe_serve.bench.report.report import Report, read_report
from moe_serve.bench.report.report_table import LiveLine
from moe_serve.errors import BenchError
from tests.support.bench.records import record, report


def full_report() -> Report:
    records = [
        record(index=i, first_s=0.5 + i / 64, end_s=2.0, cached_tokens=1,
               gaps_s=array("d", [0.25, 0.5]), gap_tokens=array("L", [1, 2]), output_tokens=4)
        for i in range(5)
    ] + [record(index=5, error="HTTP 500", detail="<script>alert(1)</script>")]  # fmt: skip
    page = Metrics.parse("moe_serve:engine_steps_total 4\nmoe_serve:generation_tokens_total 8\n")
    return report(
        records,
        summary=summarize(records, slo=Slo(ttft_s=1.0)),
        server=ServerSide.between(Metrics(values={}), page),
        notes=["a <note> & more"],
    )


class TestJson:
    def test_reads_what_it_wrote(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "r.json"
        written = full_report()
        written.write(path, has_records=True)
        assert read_report(path) == written
        written.write(path, has_records=False)
        assert read_report(path) == replace(written, records=())

    def test_schema(self, tmp_path: Path) -> None:
        path = tmp_path / "r.json"
        full_report().write(path, has_records=True)
        content = json.loads(path.read_text())
        assert (content["schema"], content["version"]) == ("moe-serve-bench", 1)
        assert content["summary"]["error_rate"] == pytest.approx(1 / 6)
        assert content["requests"][0]["gaps_s"] == [0.25, 0.5]
        assert "records" not in content

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is not JSON"),
            ("[]", "not a report of `moe-serve bench`"),
            ('{"schema": "moe-serve-bench", "version": 2}', "has version 2"),
            ('{"schema": "moe-serve-bench", "version": 1}', "is damaged: KeyError"),
        ],
    )
    def test_refused(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "r.json"
        path.write_text(content)
        with pytest.raises(BenchError, match=message):
            read_report(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="cannot read .*No such file"):
            read_report(tmp_path / "none.json")


class Balance(HTMLParser):
    """Checks that every opened tag is closed, in order."""

    VOID = ("meta", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


class TestPage:
    @pytest.mark.parametrize("num", [1, 2])
    def test_is_whole_and_fetches_nothing(self, num: int) -> None:
        page = render([full_report()] * num)
        balance = Balance()
        balance.feed(page)
        assert balance.open == []
        assert "<script" not in page, "what a server says is text"
        assert "a &lt;note&gt; &amp; more" in page
        assert not re.search(r"(src|href)\s*=|url\(|@import", page)
        pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
        assert len(pictures) == 6
        for picture in pictures:
            lines = ElementTree.fromstring(picture).findall("polyline")
            assert [line.get("class") for line in lines] == ["line a", "line b"][:num]
        assert ("B over A" in page) == (num == 2)

    def test_of_a_run_that_failed(self) -> None:
        page = render([report([record(error="timeout", first_s=None)])])
        assert page.count("<svg") == 2, "time series, and no distributions"


class TestPlot:
    def test_points_are_where_they_belong(self) -> None:
        x = Axis(label="x", low=0.0, high=10.0)
        svg = plot("t", x, Axis(label="y", low=0.0, high=1.0),
                   [PlotLine(name="a", xs=[0, 5, 10, 99], ys=[0, 0.5, 1, 2])])  # fmt: skip
        line = ElementTree.fromstring(svg).find("polyline")
        assert line is not None
        assert line.get("points") == "58.0,220.0 282.0,116.0 506.0,12.0 506.0,12.0"

    def test_logarithmic(self) -> None:
        axis = Axis(label="x", low=0.5, high=50.0, is_log=True)
        assert axis.place(5.0) == pytest.approx(0.5)
        assert axis.ticks() == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])

    def test_ticks(self) -> None:
        assert [nice_step(length) for length in (1.0, 7.0, 23.0, 400.0)] == [0.2, 2, 5, 100]
        assert Axis(label="", low=0.0, high=0.7).ticks() == pytest.approx([0, 0.2, 0.4, 0.6])
        assert [tick_label(v) for v in (0.1 + 0.2, 12_000, 5.0)] == ["0.3", "12k", "5"]


def test_the_live_line_counts_requests_as_the_report_does() -> None:
    live = LiveLine(Console())
    live.start(RunProgress(num_ok=0, num_failed=5, num_in_flight=2), 10)
    line = live._line().plain
    assert " 5/10  2 in flight  0.0 requests/s" in line and "5 failed" in line
