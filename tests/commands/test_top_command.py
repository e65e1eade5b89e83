"""`moe-serve top`: its figures, its frame at any size, and a session in a terminal."""

from __future__ import annotations

import fcntl
import http.server
import io
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from moe_serve.cli.main import main
from moe_serve.cli.server_client import NotReachedError
from moe_serve.cli.top.top import top
from moe_serve.cli.top.top_source import StateView, TopSource
from moe_serve.cli.top.top_tables import (
    bar,
    folded,
    heat_strip,
    hottest_line,
    layer_loads,
    sparkline,
)
from moe_serve.cli.top.top_view import frame
from moe_serve.errors import ConfigError
from tests.support.dashboard.fake_state import fake_state

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
METRICS = """
moe_serve:engine_steps_total{{model_name="m"}} 5
moe_serve:num_requests_running{{model_name="m"}} 2
moe_serve:num_requests_waiting{{model_name="m"}} 1
moe_serve:kv_cache_usage_perc{{model_name="m"}} 0.25
moe_serve:generation_tokens_total{{model_name="m"}} {tokens}
moe_serve:request_success_total{{model_name="m",finished_reason="stop"}} 4
moe_serve:request_success_total{{model_name="m",finished_reason="error"}} 1
moe_serve:time_to_first_token_seconds_sum{{model_name="m"}} 0.5
moe_serve:time_to_first_token_seconds_count{{model_name="m"}} 5
"""


def state(num_layers: int = 3, num_experts: int = 8, started: float = 1.0) -> dict[str, Any]:
    load = [[1 + (i * layer) % 7 for i in range(num_experts)] for layer in range(num_layers)]
    load[0] = [0] * (num_experts - 1) + [90]
    history = {"generated_per_s": [1.0, 250.0], "prompt_per_s": [9.0]}
    return {
        "server": {"version": "9.9", "model": "some-model", "started": started, "uptime_s": 4000.0,
                   "is_ready": True, "layout": "2 attention ranks, 2 expert ranks"},
        "requests": {"running": 3, "waiting": 12, "oldest_waiting_s": 7.25, "max_running": 64,
                     "finished_total": 12345, "failed_total": 0, "rejected_total": 2},
        "tokens": {"prompt_total": 7, "generated_total": 8},
        "latency": {"ttft_ms": {"p50": 12.3, "p90": 40.1, "p99": 99.0}, "tpot_ms": None},
        "kv": {"tiers": [{"name": "memory", "pages": 1000, "used": 100, "cached": 300}],
               "prefix_hit_rate": 0.4, "window": {"requests": 3, "dropped_pages": 1234}},
        "experts": {"num_layers": num_layers, "num_experts": num_experts, "top_k": 2,
                    "window_s": 60, "num_tokens": 90, "load": load, "activated_mean": None},
        "expert_memory": {"resident_bytes": 2**30, "hit_rate": 0.8},
        "ranks": [{"name": "expert-1", "phase": "loading", "load": None, "busy": 0.5,
                   "restarts": 1}],
        "placement": {"version": 3, "balance": 0.93, "num_replicas": 2, "age_s": 12.0,
                      "last_move": "8 copies moved"},
        "predictor": {"kind": "table", "recall": 0.62, "floor": 0.2, "is_acting": False},
        "history": history,
        "events": [{"seq": 4, "time": 0.0, "kind": "rank_lost", "text": "expert-1 is lost"}],
    }  # fmt: skip


def drawn(content: Any, width: int = 140, height: int = 50, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(frame(StateView(content), console, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def source_of(answer: Callable[[httpx.Request], httpx.Response]) -> TopSource:
    return TopSource("http://server/v1", "key", httpx.MockTransport(answer))


def test_servers_behind_one_address_are_asked_once_more_and_not_for_ever() -> None:
    """A load balancer sends each request to the other of two servers."""
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        num_asked += 1
        return httpx.Response(200, json=state(started=float(num_asked % 2)))

    with source_of(answer) as source:
        for expected in (1, 3, 5):
            assert source.fetch().at("requests").is_there
            assert num_asked == expected


def test_metrics_without_a_name_of_the_model() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        is_page = request.url.path == "/metrics"
        return httpx.Response(200 if is_page else 404, text="moe_serve:engine_steps_total 5\n")

    with source_of(answer) as source:
        assert source.fetch().text("server", "model") == "?"


def test_a_strip_of_experts() -> None:
    strip = heat_strip([0, 1, 2, 4, 16], width=9)
    assert strip.plain == " ▁▁▂█"
    styles = [str(span.style) for span in strip.spans]
    assert styles[0] == "grey50" and styles[-1] == "red1", "3 times the mean is hot"
    assert folded([0, 1, 2, 3, 9], 3) == [1, 3, 9]
    assert len(heat_strip(range(1000), width=64).plain) <= 64
    assert heat_strip([0, 2, 1], 6).plain == "  ██▄▄", "wider where there is room"
    assert heat_strip([0, 0], 3).plain == "  " and heat_strip([], 5).plain == ""
    assert sparkline([9, 9, 0, 4, 8], 3) == " ▄█"
    assert (bar(0.5, 4), bar(7.0, 4), bar(-1.0, 4)) == ("██░░", "████", "░░░░")


def test_the_hottest_experts() -> None:
    loads = layer_loads(StateView({"load": [[1, 3], [0, 0], [9, 0]]}))
    assert hottest_line(loads) == "hottest: 2/0 100%  0/1 75%  0/0 25%  2/1 0%"
    assert [round(load.unevenness, 2) for load in loads] == [1.5, 0.0, 2.0]
    named = layer_loads(StateView({"load": [[1, 3], [9, 0]], "layers": [3, 4]}))
    assert hottest_line(named) == "hottest: 4/0 100%  3/1 75%  3/0 25%  4/1 0%"


def test_drafts_are_shown_if_the_server_has_any() -> None:
    assert "per step" not in drawn(state())
    drafts = {"drafted_total": 120, "acceptance": 0.75, "tokens_per_step": 1.5}
    text = drawn(state() | {"speculation": drafts})
    assert "1.50 per step, 120 drafted, 75% accepted" in text
    lately = state()["history"] | {"tokens_per_step": [1.0, 2.25, None]}
    assert "2.25 per step" in drawn(state() | {"speculation": drafts, "history": lately})
    unknown = {"drafted_total": 0, "acceptance": None, "tokens_per_step": None}
    assert "? per step, 0 drafted" in drawn(state() | {"speculation": unknown})


def test_tiers_are_shown_if_the_server_has_any() -> None:
    assert "tier" not in drawn(state())
    content = state() | {"service": fake_state(9.0, 0.0)["service"]}
    lines = drawn(content, width=150).splitlines()
    (heading,) = (line for line in lines if "service tiers, order atc" in line)
    (chat,) = (line for line in lines if "interactive" in line and "ttft 1 s tpot 0.1 s" in line)
    assert "1234" in chat and "96%" in chat and "98%" in chat and "0.04 s" in chat
    (flex,) = (line for line in lines if "e2e 600 s" in line)
    assert "?" in flex and " - " in flex
    assert any("tenants   acme 63%  user:<b>bob</b> 30%" in line for line in lines)
    assert any("evenness 0.62" in line for line in lines)
    assert all(len(line) <= 80 for line in drawn(content, width=80).splitlines())
    assert "tenants" not in drawn({"service": {"tiers": [{"name": "a"}], "tenants": "?"}})


def test_pages_that_are_away() -> None:
    nothing = {"name": "memory", "pages": 0, "used": 0, "cached": 0}
    text = drawn(state() | {"kv": {"tiers": [nothing], "prefix_hit_rate": None}})
    assert "memory no pages: no attention rank is there" in text
    assert "0 of 0" not in text


def test_everything_is_in_the_frame() -> None:
    text = drawn(state())
    for part in (
        "some-model  ready  2 attention ranks, 2 expert ranks  up 1 h 06 min",
        "3 running of 64", "12 waiting, oldest 7.2 s", "12 345 finished  0 failed  2 rejected",
        "250/s generated", "TTFT p50 12.3 ms  p90 40.1 ms  p99 99.0 ms", "TPOT no request yet",
        "100 of 1 000 pages, 300 cached", "prefix hits 40%",
        "kv_window: 3 requests gave back 1 234 pages", "experts in memory 1.00 GiB",
        "3 layers of 8, top 2; 90 tokens in 60 s", "hottest: 0/7 100%", "8.00", "expert-1",
        "loading", "placement version 3  mean/max load 0.93  2 replicas", "8 copies moved",
        "predictor table  recall 0.62  floor 0.20  not followed", "expert-1 is lost",
    ):  # fmt: skip
        assert part in text, f"{part}\n{text}"


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (100, 30), (250, 80)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    lines = drawn(state(num_layers=94, num_experts=160), width, height).splitlines()
    assert all(len(line) <= width for line in lines)
    if height >= 24:
        assert len(lines) <= height
        assert any("hottest" in line for line in lines), "the experts stay"
    if height == 80:
        assert any("more even layers are not shown" in line for line in lines)


def test_what_a_server_does_not_tell_is_left_out() -> None:
    text = drawn({"requests": {}, "experts": None, "ranks": [], "events": "?"})
    assert "? running" in text and "experts" not in text and "ranks" not in text
    assert "no rows went to experts" in drawn({**state(), "experts": {"load": [[0, 0]]}})
    assert "it broke" in drawn(state(), trouble="it broke")
    assert "not ready" in drawn({**state(), "server": {"is_ready": False}})
    long_name = {**state(), "server": {"model": "a-long-name-" * 9, "is_ready": False}}
    assert "not ready" in drawn(long_name, width=80)
    assert "it broke" in drawn(long_name, width=80, trouble="it broke")


def test_events_are_kept_and_asked_for_once() -> None:
    asked: list[str] = []
    seen: list[Any] = [(1.0, [4, 5]), (1.0, [6]), (2.0, [9]), (2.0, [1])]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url.params["since"]))
        assert request.headers["authorization"] == "Bearer key"
        started, numbers = seen.pop(0)
        events = [{"seq": n, "text": str(n)} for n in numbers]
        return httpx.Response(200, json={**state(started=started), "events": events})

    with source_of(answer) as source:
        kept = [[e.number("seq") for e in source.fetch().at("events").items] for _ in range(3)]
    assert kept == [[4, 5], [4, 5, 6], [1]], "the third is another process"
    assert asked == ["0", "5", "6", "0"]


def test_a_server_without_the_route_is_read_by_its_metrics() -> None:
    tokens = iter((10, 30))

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/dashboard/state":
            return httpx.Response(404)
        return httpx.Response(200, text=METRICS.format(tokens=next(tokens)))

    with source_of(answer) as source:
        first = source.fetch()
        assert source.is_plain and first.numbers("history", "generated_per_s") == []
        second = source.fetch()
    assert second.numbers("history", "generated_per_s")[0] > 0
    text = drawn(second.content)
    for part in ("2 running", "1 waiting", "5 finished  1 failed", "mean 100.0 ms", "25%"):
        assert part in text, f"{part}\n{text}"


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(401), ConfigError, "requires an API key"),
        (httpx.Response(503), NotReachedError, "answers with status 503"),
        (httpx.Response(200, text="hello"), NotReachedError, "but not like moe-serve"),
        (httpx.Response(200, json=[1]), NotReachedError, "but not like moe-serve"),
    ],
)
def test_answers_that_are_none(
    response: httpx.Response, error: type[Exception], message: str
) -> None:
    with source_of(lambda _: response) as source, pytest.raises(error, match=message):
        source.fetch()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    return int(exit_info.value.code or 0)


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top", "--url", "http://127.0.0.1:1", "--once") == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert run("top", "--url", "nonsense") == 2
    assert "is not a URL such as" in capsys.readouterr().err
    assert run("top", "--url", "http://127..0.1:8") == 2
    assert "http://127..0.1:8 is not a URL: " in capsys.readouterr().err


class _Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = json.dumps(state()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_without_a_terminal_it_prints_one_frame(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("top", "--url", url) == 0
    text = capsys.readouterr().out
    assert "some-model" in text and "\x1b" not in text
    assert max(map(len, text.splitlines())) == 140


class Terminal:
    """`moe-serve top` in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self.own, self.its = pty.openpty()
        self.resize(24, 80)
        self.before = termios.tcgetattr(self.its)
        command = [sys.executable, "-m", "moe_serve", "top", "--url", url, "--interval", "0.3"]
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=self.its, stdout=self.its, stderr=self.its, cwd=ROOT, env=environment
        )
        self.output = b""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, is_enough: Callable[[bytes], bool]) -> bytes:
        """Reads until `is_enough` and returns the bytes since the last call."""
        came, end = b"", time.monotonic() + 100
        while not is_enough(came) and time.monotonic() < end:
            if select.select([self.own], [], [], 0.1)[0]:
                came += os.read(self.own, 65536)
        self.output += came
        assert is_enough(came), came[-2000:]
        return came

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.its)


def widest(output: bytes) -> int:
    lines = ESCAPES.sub(b"", output).replace(b"\r", b"").split(b"\n")
    return max(len(line.decode("utf-8", errors="replace").rstrip()) for line in lines)


def test_in_a_terminal(url: str) -> None:
    """The command draws, follows a new size, and q leaves the terminal as it was."""
    terminal = Terminal(url)
    try:
        terminal.read_until(lambda came: b"hottest" in came)
        terminal.resize(40, 130)
        terminal.read_until(lambda came: b"expert-1 is lost" in came and widest(came) >= 130)
        os.write(terminal.own, b"q")
        terminal.read_until(lambda came: b"\x1b[?1049l" in came)  # the other screen is left
        assert terminal.process.wait(60) == 0
        assert termios.tcgetattr(terminal.its) == terminal.before
        assert b"Traceback" not in terminal.output
    finally:
        terminal.close()


def test_ctrl_c_in_a_terminal(url: str) -> None:
    terminal = Terminal(url)
    try:
        terminal.read_until(lambda came: b"hottest" in came)
        terminal.process.send_signal(2)
        terminal.read_until(lambda came: b"\x1b[?1049l" in came)  # else it might wait for a reader
        assert terminal.process.wait(60) == 130
        assert termios.tcgetattr(terminal.its) == terminal.before
        assert b"Traceback" not in terminal.output
    finally:
        terminal.close()


def test_an_interval_that_is_no_number_is_a_sentence() -> None:
    """Not every version of typer refuses NaN, and with NaN no request would ever be due."""
    with pytest.raises(ConfigError, match="--interval must be 0.2 to 60 seconds, got nan"):
        top(url="http://127.0.0.1:1", interval=math.nan)
