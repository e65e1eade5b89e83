"""Runs the benchmark against a server on this machine and checks its requests and its report."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_serve.bench.bench_run import run_bench
from moe_serve.bench.client import load_client
from moe_serve.bench.client.connection import Target
from moe_serve.bench.client.endpoint import Endpoint, RunPlan
from moe_serve.bench.client.load_client import allow_open_files
from moe_serve.bench.report.report import Report, read_report
from moe_serve.bench.workload.workload import GammaArrivals, Lengths, SharedPrefixes, Workload
from moe_serve.cli.main import main
from moe_serve.errors import BenchError, BenchServerError
from tests.support.bench.fake_openai import (
    FakeServer,
    Reply,
    counted_words,
    event,
    http,
    running,
    streamed,
)

Capture = pytest.CaptureFixture[str]


def plan(url: str, *, endpoint: Mapping[str, Any] | None = None, **fields: Any) -> RunPlan:
    """A plan with fields of the plan, or of its workload."""
    of_plan = {"api_key", "data", "timeout_s", "num_warm_up", "max_in_flight", "slo"}
    load = {"seed": 1, "concurrency": 2, "num_requests": 6, "output_tokens": Lengths(low=3, high=3)}
    load |= {key: value for key, value in fields.items() if key not in of_plan}
    settings: dict[str, Any] = {"name": "completions", "model": ""}
    return RunPlan(
        url=url,
        workload=Workload(**load),
        endpoint=Endpoint(**settings | dict(endpoint or {})),
        **{key: value for key, value in fields.items() if key in of_plan},
    )


def bench(server: FakeServer, **fields: Any) -> Report:
    async def run() -> Report:
        async with server:
            return await run_bench(plan(server.url, **fields))

    return asyncio.run(run())


def prompts_of(server: FakeServer, num: int) -> list[list[str]]:
    """The words of the last `num` prompts: the load, not the probes and the warm-up."""
    return [body["prompt"].split() for body in server.bodies[-num:]]


class TestRuns:
    def test_closed_loop(self) -> None:
        server = FakeServer()
        report = bench(server, prompt_tokens=Lengths(low=43, high=43))
        s = report.summary
        assert (s.num_ok, s.num_failed, s.peak_in_flight) == (6, 0, 2)
        assert (s.prompt_tokens, s.output_tokens) == (6 * 43, 18), "20 words are 43 tokens here"
        assert s.ttft_ms is not None and s.ttft_ms.num == 6
        assert (report.model, report.server) == ("fake", None)
        assert [record.index for record in sorted(report.records, key=lambda r: r.index)] == [
            0, 1, 2, 3, 4, 5,
        ]  # fmt: skip
        assert server.num_connections == 3, "one for the probes, one for each that is in flight"

    def test_what_is_asked(self) -> None:
        server = FakeServer()
        bench(server, endpoint={"extra": {"top_p": 0.5, "temperature": None}}, api_key="secret")
        body = server.bodies[-1]
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert (body["top_p"], body["ignore_eos"], body["max_tokens"]) == (0.5, True, 3)
        assert "temperature" not in body
        assert all("authorization: bearer secret" in head.lower() for head in server.heads)

    def test_the_warm_up_tells_the_cache_nothing(self) -> None:
        server = FakeServer()
        bench(server, num_warm_up=2, prefixes=SharedPrefixes(num_tokens=40, num_prefixes=1))
        load, others = prompts_of(server, 6), server.bodies[:-6]
        assert len(others) == 4, "two to learn how words count, two to warm up"
        starts = {tuple(words[:5]) for words in load}
        assert len(starts) == 1, "the prefix is shared"
        assert starts.isdisjoint(tuple(b["prompt"].split()[:5]) for b in others)

    def test_open_loop_over_chat_without_streaming(self) -> None:
        server = FakeServer()
        report = bench(
            server,
            concurrency=None,
            arrivals=GammaArrivals(rate=500.0),
            endpoint={"name": "chat", "is_stream": False},
        )
        assert report.summary.num_ok == 6 and report.summary.ttft_ms is None
        assert report.summary.e2e_ms is not None and report.health.lateness is not None
        assert server.bodies[-1]["messages"][0]["role"] == "user"

    def test_token_ids_need_no_probe(self) -> None:
        server = FakeServer()
        report = bench(server, data="tokens", num_warm_up=0)
        assert len(server.bodies) == 6 and len(server.bodies[0]["prompt"]) == 512
        assert report.summary.prompt_tokens == 6 * 512

    def test_our_own_server_tells_more(self) -> None:
        pages = ["moe_serve:engine_steps_total 5\n", "moe_serve:engine_steps_total 25\n"]
        report = bench(FakeServer(metrics=pages))
        assert report.server is not None and report.server.num_steps == 20


class TestFailures:
    def test_errors_by_kind(self) -> None:
        """Every second request of the load is refused."""
        num = iter(range(100))

        def every_second(path: str, body: Mapping[str, Any]) -> Reply:
            if next(num) % 2:
                return Reply([http(429, b'{"error": {"message": "full"}}')])
            return counted_words(path, body)

        report = bench(FakeServer(every_second), data="tokens", num_warm_up=0)
        s = report.summary
        assert (s.num_ok, s.errors, s.error_examples) == (3, {"HTTP 429": 3}, {"HTTP 429": "full"})

    def test_an_idle_connection_that_was_closed_is_replaced(self) -> None:
        def closing(path: str, body: Mapping[str, Any]) -> Reply:
            return Reply(counted_words(path, body).pieces, is_open=False)

        report = bench(FakeServer(closing), data="tokens", num_warm_up=0, concurrency=1)
        assert report.summary.num_ok == 6, report.summary.errors

    def test_a_stream_that_breaks_off(self) -> None:
        def breaking(path: str, body: Mapping[str, Any]) -> Reply:
            pieces = streamed(event({"choices": [{"index": 0, "text": "x"}]}))
            return Reply(pieces[:2], is_open=False)

        report = bench(FakeServer(breaking), data="tokens", num_warm_up=0)
        assert report.summary.errors == {"connection lost": 6}

    def test_no_answer_in_time(self) -> None:
        def hanging(path: str, body: Mapping[str, Any]) -> Reply:
            return Reply([], hangs=True)

        report = bench(
            FakeServer(hanging), data="tokens", num_warm_up=0, num_requests=2, timeout_s=0.05
        )
        assert report.summary.errors == {"timeout": 2}

    def test_a_warm_up_that_fails_ends_it(self) -> None:
        def refusing(path: str, body: Mapping[str, Any]) -> Reply:
            return Reply([http(400, b'{"error": {"message": "Unrecognized: ignore_eos"}}')])

        with pytest.raises(BenchServerError, match="warm-up failed.*--no-ignore-eos"):
            bench(FakeServer(refusing), data="tokens")

    def test_no_server(self) -> None:
        with pytest.raises(BenchServerError, match="no server answers"):
            asyncio.run(run_bench(plan("http://127.0.0.1:1")))

    def test_too_few_open_files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load_client.resource, "getrlimit", lambda _: (64, 100))
        monkeypatch.setattr(load_client.resource, "setrlimit", lambda *_: None)
        assert allow_open_files(1000) == 100
        with pytest.raises(
            BenchError,
            match="200 requests in progress need 264 open files.*allows 100.*lower --concurrency",
        ):
            asyncio.run(run_bench(plan("http://127.0.0.1:1", concurrency=200)))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h", "https://h:443"),
        ("http://h/api/v1", "http://h:80/api"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert Target.of(url).url == expected


@pytest.mark.parametrize("url", ["h:8000", "ftp://h", "http://", "http://h:x"])
def test_no_url(url: str) -> None:
    with pytest.raises(BenchError, match="is not a URL"):
        Target.of(url)


def run_cli(*arguments: str) -> int:
    """The exit code of `moe-serve bench ARGUMENTS`."""
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    code = exit_info.value.code
    assert code is None or isinstance(code, int)
    return code or 0


class TestCommand:
    def test_run_save_and_compare(self, tmp_path: Path, capsys: Capture) -> None:
        a, page = tmp_path / "a.json", tmp_path / "a.html"
        with running(FakeServer()) as server, running(FakeServer()) as peer:
            code = run_cli(
                "--url", server.url, "--peer-url", peer.url, "--concurrency", "2", "--requests",
                "5", "--seed", "4", "--slo", "e2e=60s", "--json", str(a), "--save-requests",
                "--html", str(page), "--output-tokens", "3", "--api-key", "hidden",
            )  # fmt: skip
        out = capsys.readouterr().out
        assert code == 0, out
        assert prompts_of(server, 5) == prompts_of(peer, 5), "not the same requests"
        assert "5 answered, 0 failed" in out and "100.0% met e2e 60000 ms" in out
        assert "B over A" in out and page.exists()
        b = tmp_path / "a-peer.json"
        assert len(read_report(b).records) == 5
        assert "hidden" not in a.read_text() + page.read_text() + out
        for command in (("compare", str(a), str(b)), ("--compare", str(a), str(b))):
            assert run_cli(*command) == 0
            assert "95% interval" in capsys.readouterr().out

    def test_a_peer_that_fails_takes_no_figures_along(
        self, tmp_path: Path, capsys: Capture
    ) -> None:
        def refusing(path: str, body: Mapping[str, Any]) -> Reply:
            return Reply([http(500, b"{}")])

        report = tmp_path / "a.json"
        with running(FakeServer()) as server, running(FakeServer(refusing)) as peer:
            code = run_cli(
                "--url", server.url, "--peer-url", peer.url, "--concurrency", "1", "--requests",
                "3", "--data", "tokens", "--json", str(report),
            )  # fmt: skip
        printed = capsys.readouterr()
        assert code == 1 and "the warm-up failed: HTTP 500" in printed.err
        assert "3 answered, 0 failed" in printed.out and read_report(report).summary.num_ok == 3
        assert not (tmp_path / "a-peer.json").exists()

    def test_a_comparison_says_that_the_traces_were_not_the_same(
        self, tmp_path: Path, capsys: Capture
    ) -> None:
        reports = [tmp_path / "a.json", tmp_path / "b.json"]
        with running(FakeServer()) as server:
            for name, scale, path in zip(("day", "night"), ("1", "0.5"), reports, strict=True):
                trace = tmp_path / f"{name}.jsonl"
                trace.write_text('{"at_s": 0, "prompt_tokens": 3, "output_tokens": 2}\n')
                flags = ("--trace", str(trace), "--scale-time", scale, "--json", str(path))
                assert run_cli("--url", server.url, "--slo", f"e2e={scale}s", *flags) == 0
        assert "source night.jsonl" in " ".join(capsys.readouterr().out.split())
        assert run_cli("compare", *map(str, reports)) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "differ in source: day.jsonl, night.jsonl" in out
        assert "differ in trace_scale_time: 1.0, 0.5" in out
        assert "differ in slo: e2e 1000 ms against e2e 500 ms; goodput is not compared" in out

    def test_errors_make_exit_code_1_above_their_limit(self, capsys: Capture) -> None:
        def refusing(path: str, body: Mapping[str, Any]) -> Reply:
            return Reply([http(500, b"{}")] if len(body["prompt"]) > 40 else counted_words(
                path, body).pieces)  # fmt: skip

        with running(FakeServer(refusing)) as server:
            load = (
                "--url", server.url, "--concurrency", "1", "--requests", "8", "--warmup", "0",
                "--data", "tokens", "--prompt-tokens", "30:50", "--seed", "1",
            )  # fmt: skip
            assert run_cli(*load) == 1
            assert run_cli(*load, "--max-error-rate", "0.99") == 0
        assert "x HTTP 500" in capsys.readouterr().out

    def test_no_server_is_exit_code_1(self, capsys: Capture) -> None:
        assert run_cli("--url", "http://127.0.0.1:1", "--rate", "1") == 1
        assert capsys.readouterr().err == (
            "error: no server answers at http://127.0.0.1:1: start one with `moe-serve serve`.\n"
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give the URL of the server"),
            (["--url", "http://h"], "choose how requests arrive"),
            (["--url", "http://h", "--rate", "1", "--concurrency", "1"], "cannot be combined"),
            (["--url", "http://h", "--concurrency", "1", "--burstiness", "2"], "--burstiness"),
            (
                ["--url", "http://h", "--rate", "1", "--max-prompt", "2"],
                "--max-prompt only applies to --trace",
            ),
            (["--url", "http://h", "--rate", "inf"], "--rate must be a finite number, got inf"),
            (
                ["--url", "http://h", "--rate", "1", "--timeout", "inf"],
                "--timeout must be a finite",
            ),
            (["--url", "http://h", "--rate", "1", "--body", '{"x": NaN}'], "--body is not JSON"),
            (["--url", "http://h", "--rate", "1", "--body", "[1]"], "takes a JSON object"),
            (["--url", "http://h", "--rate", "1", "--body", '{"n": 2}'], "may not set n"),
            (["--url", "http://h", "--rate", "1", "--api-key", "a\r\nb"], "API key"),
            (["--url", "http://h", "--rate", "1", "--save-requests"], "needs --json"),
            (
                ["--url", "http://h", "--rate", "1", "--no-stream", "--slo", "e2e=1s,ttft=1s"],
                "--no-stream does not measure",
            ),
            (["--url", "http://127.0.0.1:1", "--rate", "1", "--peer-url", "h:1"], "h:1 is not a"),
            (["--url", "http://h", "--rate", "1", "--json", "/no/such/x.json"], "cannot write"),
            (["compare", "/no/a.json", "/no/b.json"], "cannot read"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, capsys: Capture, arguments: list[str], message: str
    ) -> None:
        assert run_cli(*arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


def test_ctrl_c_reports_what_had_ended(tmp_path: Path) -> None:
    """The third request of the load is never answered; the signal comes while the run waits for
    it."""
    path = tmp_path / "r.json"
    num = iter(range(100))

    def interrupting(name: str, body: Mapping[str, Any]) -> Reply:
        if next(num) < 2:
            return counted_words(name, body)
        os.kill(os.getpid(), signal.SIGINT)
        return Reply([], hangs=True)

    with running(FakeServer(interrupting)) as server:
        code = run_cli(
            "--url", server.url, "--concurrency", "1", "--data", "tokens", "--warmup", "0",
            "--json", str(path),
        )  # fmt: skip
    report = json.loads(path.read_text())
    assert (code, report["is_interrupted"]) == (130, True)
    assert (report["summary"]["num_ok"], report["summary"]["num_unfinished"]) == (2, 1)


def test_it_needs_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, moe_serve.cli.bench.bench_plan, moe_serve.bench.bench_run; "
        "import moe_serve.bench.report.html_page; "
        "print([m for m in sys.modules if m in ('torch', 'matplotlib', 'moe_serve.engine')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
