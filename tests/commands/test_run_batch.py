"""`moe-serve run-batch`: every line gets one row, whatever it holds, and a second run continues."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moe_serve.cli.main import main
from moe_serve.cli.run_batch.batch_output import BatchLine, BatchOutput, BatchRow, read_line
from moe_serve.cli.run_batch.batch_run import (
    AHEAD_LINES,
    NUM_TRIES,
    BatchCount,
    BatchTarget,
    run_lines,
)
from moe_serve.errors import ConfigError, EngineDeadError

ROOT = Path(__file__).resolve().parents[2]
Answer = Callable[[httpx.Request], httpx.Response]


def line(custom_id: Any, **body: Any) -> bytes:
    content = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(content).encode() + b"\n"


def good(request: httpx.Request) -> httpx.Response:
    if request.method == "GET":
        return httpx.Response(200, json={"data": []})
    body = {"echo": json.loads(request.content), "usage": {"completion_tokens": 3}}
    return httpx.Response(200, content=json.dumps(body), headers={"X-Request-Id": "req-1"})


def answered(
    lines: Iterable[bytes], path: Path, answer: Answer = good, concurrency: int = 4
) -> BatchCount:
    async def run() -> BatchCount:
        count = BatchCount()
        transport = httpx.MockTransport(answer)
        async with BatchTarget("http://server", "k", transport, pause_s=0.001) as target:
            with BatchOutput(path) as output:
                await run_lines(lines, output, target, concurrency, count)
        return count

    return asyncio.run(run())


def rows(path: Path) -> dict[str, Any]:
    """Returns {id: row} of a file in which each line is one row."""
    found = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    assert all(row.keys() == {"id", "custom_id", "response", "error"} for row in found)
    return {row["id"]: row for row in found}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main(["run-batch", *arguments])
    return int(exit_info.value.code or 0)


def test_each_line_gets_a_row(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [line("a", prompt="x"), b"\n", line("ä\ud800", prompt="\ud800"), line("b", top_p=1e999)]
    count = answered(lines, out)
    assert (count.answered, count.num_tokens, count.num_failed) == (3, 9, 0)
    assert rows(out)["batch_req_1"] == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req-1",
            "body": {"echo": {"prompt": "x"}, "usage": {"completion_tokens": 3}},
        },
        "error": None,
    }
    assert rows(out).keys() == {"batch_req_1", "batch_req_3", "batch_req_4"}
    echoed = rows(out)["batch_req_3"]["response"]["body"]["echo"]
    assert echoed == {"prompt": "\ud800"}, "what is no text is for the server to judge"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (b"nonsense", "invalid_json", "line 7 is not JSON"),
        (b"\xff\xfe", "invalid_json", "line 7 is not JSON"),
        (b"[" * 100_000, "invalid_json", "line 7 is not JSON"),
        (b"[1]", "invalid_json", "not a JSON object"),
        (line(None), "invalid_custom_id", "custom_id must be a string"),
        (line(""), "invalid_custom_id", "custom_id must be a string"),
        (line("x" * 513), "invalid_custom_id", "1 to 512 characters"),
        (line("a").replace(b"POST", b"GET"), "invalid_method", "method must be POST, got 'GET'"),
        (line("a").replace(b"/v1/comp", b"/admin/"), "invalid_url", "got '/admin/letions'"),
        (line("a").replace(b"{}", b"[]"), "invalid_body", "body must be a JSON object"),
        (line("a", stream=True), "invalid_body", "stream must be false or left out"),
    ],
)
def test_a_bad_line_is_a_row(text: bytes, code: str, message: str, tmp_path: Path) -> None:
    row = read_line(7, text)
    assert isinstance(row, BatchRow) and row.error_code == code and message in row.error_message
    count = answered([text, line("good")], tmp_path / "out.jsonl")
    assert (count.bad, count.answered) == (1, 1), "the others are answered all the same"
    assert rows(tmp_path / "out.jsonl")["batch_req_1"]["error"]["code"] == code


def test_what_the_server_refuses_is_a_row(tmp_path: Path) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, text="no JSON") if b"bad" in request.content else good(request)

    count = answered([line("a", prompt="bad"), line("b")], tmp_path / "out", refuse)
    assert (count.refused, count.answered) == (1, 1)
    row = rows(tmp_path / "out")["batch_req_1"]
    assert row["error"] is None
    assert row["response"]["status_code"] == 400 and row["response"]["body"] == "no JSON"


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [line("a"), b"bad", line("b"), line("a"), line("c")]
    answered(lines[:3], out)
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_4", "cust')  # a run that was killed in the middle of a row
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.content)
        return good(request)

    count = answered(lines, out, answer)
    assert (count.skipped, count.answered, count.bad) == (3, 1, 1)
    assert len(asked) == 1, "only c"
    found = rows(out)
    assert len(found) == 5 and found["batch_req_4"]["error"]["code"] == "repeated_custom_id"
    assert answered(lines, out).skipped == 5


def test_a_row_that_lacks_but_its_newline_is_kept(tmp_path: Path) -> None:
    """An editor or a copy may drop the last newline; the paid answer is kept all the same."""
    out = tmp_path / "out.jsonl"
    answered([line("a"), line("b")], out, concurrency=1)
    before = out.read_bytes()
    out.write_bytes(before[:-1])
    count = answered([line("a"), line("b"), line("c")], out, concurrency=1)
    assert (count.skipped, count.answered) == (2, 1)
    assert out.read_bytes().startswith(before) and len(rows(out)) == 3


def test_a_repeated_id_does_not_stand_for_its_line(tmp_path: Path) -> None:
    """The row of the repetition came first; the first line itself still has to be answered."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(BatchRow(number=2, custom_id=None, error_code="repeated_custom_id").to_json())
    count = answered([line("a"), line("a")], out)
    assert (count.answered, count.skipped) == (1, 1)


def test_so_many_at_once_and_no_more(tmp_path: Path) -> None:
    running, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001)
        running -= 1
        return good(request)

    answered([line(str(i)) for i in range(40)], tmp_path / "out", answer, 5)  # type: ignore[arg-type]
    assert most == 5 and len(rows(tmp_path / "out")) == 40


def test_full_queues_and_broken_connections_are_tried_again(tmp_path: Path) -> None:
    problems = [httpx.ReadError("reset"), httpx.Response(429), httpx.Response(503)]

    def answer(request: httpx.Request) -> httpx.Response:
        problem = problems.pop() if problems else good(request)
        if isinstance(problem, Exception):
            raise problem
        return problem

    assert answered([line("a")], tmp_path / "out", answer).answered == 1
    count = answered([line("b")], tmp_path / "out", lambda _: httpx.Response(503))
    assert count.refused == 1, "in the end its answer stands"


def test_a_line_that_breaks_the_connection_is_a_row(tmp_path: Path) -> None:
    num_asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_asked
        if b"bad" not in request.content:
            return good(request)
        num_asked += 1
        raise httpx.ReadError("reset")

    count = answered([line("a", prompt="bad"), line("b")], tmp_path / "out", answer)
    assert (count.bad, count.answered, num_asked) == (1, 1, NUM_TRIES)
    assert rows(tmp_path / "out")["batch_req_1"]["error"]["code"] == "connection_error"


def test_a_server_that_is_gone_ends_the_run(tmp_path: Path) -> None:
    """The unanswered lines get no rows, so that the next run sends them."""
    num_good = 2

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal num_good
        num_good -= 1
        if num_good < 0:
            raise httpx.ConnectError("refused")
        return good(request)

    out = tmp_path / "out"
    with pytest.raises(EngineDeadError, match="run the same command again"):
        answered([line(str(i)) for i in range(9)], out, answer, 1)
    assert len(rows(out)) == 2
    assert answered([line(str(i)) for i in range(9)], out).answered == 7


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    with (
        BatchOutput(tmp_path / "out"),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        BatchOutput(tmp_path / "out")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_ends_the_run_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"/dev/full: a row cannot be written: No space left.*again\."
    ):
        answered([line("a")], Path("/dev/full"))


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in.jsonl", str(tmp_path / "out")
    source.write_bytes(line("a"))
    foreign = tmp_path / "foreign"
    foreign.write_text("my notes\n", "utf-8")
    unended = tmp_path / "unended"  # as half a row that a killed run left
    unended.write_text("my notes", "utf-8")
    for arguments, code, message in (
        (["-i", str(tmp_path / "no"), "-o", out, "--url", "http://h"], 2, "cannot read the lines"),
        (["-i", str(source), "-o", str(source)], 2, "is both input and output"),
        (["-i", str(source), "-o", str(foreign)], 2, "foreign:1 is not a row that run-batch wrote"),
        (["-i", str(source), "-o", str(unended)], 2, "unended:1 is not a row that run-batch wrote"),
        (["-i", str(source), "-o", "/nonexistent/out"], 2, "cannot write the rows"),
        (["-i", str(source), "-o", out, "--url", "nonsense"], 2, "is not a URL such as"),
        (["-i", str(source), "-o", out, "--url", "http://h", "--model", "m"], 2, "--url uses a"),
        (["-i", str(source), "-o", out, "--url", "http://127.0.0.1:1"], 1, "no server answers"),
        (["-i", str(source), "-o", out, "--url", "http://h", "--api-key", "k\n"], 2, "line break"),
    ):
        assert run(*arguments) == code, arguments
        assert message in capsys.readouterr().err, arguments
    assert foreign.read_text("utf-8") == "my notes\n" and unended.read_text("utf-8") == "my notes"


def test_the_demonstration_model_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    fields = {"prompt": "Once", "max_tokens": 3, "temperature": 0}
    fields |= {"logprobs": 0, "logprob_token_ids": [7]}
    lines = [line(str(i), **fields) for i in range(3)]
    source.write_bytes(b"".join([*lines, line("long", prompt="x", max_tokens=10**6)]))
    assert run("-i", str(source), "-o", str(out)) == 3, "one row is an error"
    assert "3 answered, 1 refused, 0 not sent or lost, 0 already answered; 9 tokens" in (
        capsys.readouterr().err
    )
    bodies = [row["response"]["body"] for row in rows(out).values()]
    assert len({body["choices"][0]["text"] for body in bodies if "choices" in body}) == 1
    assert [body["error"]["code"] for body in bodies if "error" in body] == [
        "context_length_exceeded"
    ]
    (fingerprint,) = {body["system_fingerprint"] for body in bodies if "choices" in body}
    assert fingerprint.startswith("fp_")
    for body in bodies:
        for choice in body.get("choices", ()):
            assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2, 2, 2]


class _Slow(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.02)
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Quiet."""


def test_lines_from_a_pipe(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out.jsonl"
    os.mkfifo(pipe)
    lines = line("a") + line("b")
    writer = threading.Thread(target=pipe.write_bytes, args=(lines,))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        for each in (thread, writer):
            each.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert run("-i", str(pipe), "-o", str(out), "--url", url) == 0
        server.shutdown()
        for each in (thread, writer):
            each.join()
    assert {row["custom_id"] for row in rows(out).values()} == {"a", "b"}


def test_a_producer_that_waits_for_a_row_gets_it(tmp_path: Path) -> None:
    """The producer then waits for a line until the run ends, and the run does not wait for that
    line."""
    has_row, is_over = threading.Event(), threading.Event()

    class Output(BatchOutput):
        def append(self, row: BatchRow) -> None:
            super().append(row)
            has_row.set()

    def lines() -> Iterator[bytes]:
        yield line("a")
        assert has_row.wait(60), "the row of the first line is written before there is a second"
        yield line("b", prompt="gone")
        is_over.wait(60)

    def answer(request: httpx.Request) -> httpx.Response:
        if b"gone" in request.content or (request.method == "GET" and has_row.is_set()):
            raise httpx.ConnectError("refused")
        return good(request)

    async def run() -> None:
        transport = httpx.MockTransport(answer)
        async with BatchTarget("http://server", None, transport, pause_s=0.001) as target:
            with Output(tmp_path / "out") as output:
                await run_lines(lines(), output, target, 4, BatchCount())

    try:
        with pytest.raises(EngineDeadError):
            asyncio.run(run())
        assert rows(tmp_path / "out").keys() == {"batch_req_1"}
        assert not is_over.is_set()
    finally:
        is_over.set()


def test_lines_are_not_read_far_ahead(tmp_path: Path) -> None:
    num_read, most = 0, 0

    def lines() -> Iterator[bytes]:
        nonlocal num_read
        for number in range(3 * AHEAD_LINES):
            num_read += 1
            yield line(str(number), prompt=number)

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal most
        most = max(most, num_read - json.loads(request.content)["prompt"])
        return good(request)

    assert answered(lines(), tmp_path / "out", answer, 1).answered == 3 * AHEAD_LINES
    assert most <= AHEAD_LINES + 2, "one is asked, and one is in the thread's hand"


def test_lines_that_cannot_be_read_to_the_end(tmp_path: Path) -> None:
    def lines() -> Iterator[bytes]:
        yield line("a")
        raise ConfigError("cannot read the lines in x: Input/output error.")

    with pytest.raises(ConfigError, match="cannot read the lines in x"):
        answered(lines(), tmp_path / "out")


def test_ctrl_c_ends_a_run_whose_producer_is_silent(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "moe_serve", "run-batch", "-i", "/dev/stdin", "-o", str(out)]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        process = subprocess.Popen(
            [*command, "--url", url], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(line("a"))
        process.stdin.flush()
        end = time.monotonic() + 60
        while (not out.exists() or not out.stat().st_size) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            returncode = process.wait(timeout=60)
        finally:
            process.kill()
            process.stdin.close()
            assert process.stderr is not None
            errors = process.stderr.read()
            process.stderr.close()
            server.shutdown()
            thread.join()
    assert returncode == 130, errors.decode()
    assert (
        b"1 answered" in errors and b"interrupted; run the same command again to continue" in errors
    )
    assert rows(out).keys() == {"batch_req_1"}


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(line(str(i)) for i in range(4000)))
    command = [sys.executable, "-m", "moe_serve", "run-batch", "-i", str(source), "-o", str(out)]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        process = subprocess.Popen(
            [*command, "--url", url, "--concurrency", "2"], cwd=ROOT, stderr=subprocess.PIPE
        )
        end = time.monotonic() + 60
        while (not out.exists() or not out.stat().st_size) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        server.shutdown()
        thread.join()
    assert process.returncode == 130, errors.decode()
    assert (
        b"interrupted; run the same command again to continue" in errors
        and b"Traceback" not in errors
    )
    assert 0 < len(rows(out)) < 4000


def test_a_line_of_the_right_kind() -> None:
    expected = BatchLine(number=1, custom_id="a", url="/v1/completions", body={"prompt": "x"})
    assert read_line(1, line("a", prompt="x")) == expected
