"""Standard output that is full, closed, or a pipe without a reader, and narrow terminals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.table import Table

from moe_serve.cli.console import optional_output, wide_console
from moe_serve.cli.main import main
from tests.support.forks.order import WITHOUT_STDOUT
from tests.support.server.server_process import ROOT, port_of_ones_own, server_environment

FULL = Path("/dev/full")
pytestmark = [
    pytest.mark.timeout(400),  # processes start
    pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full"),
]


def start(*arguments: str, module: str = "moe_serve", **streams: Any) -> subprocess.Popen[str]:
    environ = server_environment(streams.pop("environ", {}))
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True, **streams
    )


def close_stdout() -> None:
    os.close(1)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(("--version",), "1"), (("config", "show"), ""), (("-h",), "")]
)
def test_a_full_output_is_said_in_one_sentence(arguments: tuple[str, ...], unbuffered: str) -> None:
    with FULL.open("w") as full:
        environ = {"PYTHONUNBUFFERED": unbuffered}
        with start(*arguments, stdout=full, environ=environ) as process:
            _, said = process.communicate(timeout=200)
    sentence = "error: cannot write to the standard output: No space left on device.\n"
    assert (process.returncode, said) == (1, sentence)


def test_a_pipe_without_a_reader_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start("config", "show", stdout=writer) as process:
        os.close(writer)
        _, said = process.communicate(timeout=200)
    assert (process.returncode, said) == (1, "")


def test_a_closed_output_is_fine() -> None:
    with start("--version", preexec_fn=close_stdout) as process:
        _, said = process.communicate(timeout=200)
    assert (process.returncode, said) == (0, "")


def answer_of(port: int, process: subprocess.Popen[str]) -> httpx.Response:
    deadline = time.monotonic() + 200
    while True:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "the server is not ready"
        try:
            url = f"http://127.0.0.1:{port}/v1/completions"
            body = {"prompt": "a", "max_tokens": 2}
            answer = httpx.post(url, json=body, timeout=60, trust_env=False)
        except httpx.TransportError:
            answer = None
        if answer is not None and answer.status_code != 503:
            return answer
        time.sleep(0.1)


@pytest.mark.parametrize("is_closed", [False, True], ids=["full", "closed"])
def test_a_server_goes_on_without_its_ready_message(is_closed: bool) -> None:
    port = port_of_ones_own()
    flags = ("serve", "--port", str(port), "--num-threads", "1", "--num-pages", "256")
    with FULL.open("w") as full:
        module = WITHOUT_STDOUT if is_closed else "moe_serve"
        with start(*flags, module=module, stdout=full) as process:
            try:
                for _ in range(2):
                    answer = answer_of(port, process)
                    assert answer.status_code == 200, answer.text
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=200)
            finally:
                process.kill()
    assert process.returncode == 0, said
    assert "Traceback" not in said and "Exception ignored" not in said, said
    warning = rf"ready at http://127\.0\.0\.1:{port} \(the standard output cannot be written"
    assert bool(re.search(warning, said)) is not is_closed, said


def test_what_is_optional_is_logged_instead(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with optional_output("two nodes are there"):
        print("two nodes")  # noqa: T201
    assert capfd.readouterr().out == "two nodes\n" and not caplog.messages
    with optional_output("two nodes are there"):
        raise OSError(28, "No space left on device")
    assert caplog.messages == [
        "two nodes are there (the standard output cannot be written: No space left on device)"
    ]


Capture = pytest.CaptureFixture[str]
TRACE = Path(__file__).resolve().parents[2] / "configs" / "placement" / "demo-model.safetensors"


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)


def test_a_table_of_figures_is_not_cut(capsys: Capture) -> None:
    table = Table("name", "seconds", "what it says")
    table.add_column("count", justify="right", no_wrap=True)
    table.add_row("a name of many letters", "123456.789", "three words here", "98,765,432")
    wide_console().print(table)
    printed = capsys.readouterr().out
    for cell in ("a name of many letters", "123456.789", "three words here", "98,765,432"):
        assert cell in printed, printed


def test_a_grid_of_words_is_folded(capsys: Capture) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_row("proof", "many words " * 10)
    wide_console().print(grid)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40


def test_a_trace_is_shown_whole(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["trace", "show", str(TRACE), "--windows", "2"])
    printed = capsys.readouterr().out
    assert not exit_info.value.code and "\u2026" not in printed and "balancedness" in printed


def test_control_characters_of_a_file_are_shown_as_escapes(capsys: Capture) -> None:
    table = Table("name", "count")
    table.add_row("evil\x1b]0;title\x07", "1")
    wide_console().print(table)
    wide_console().print("again\x9b31m")
    printed = capsys.readouterr().out
    assert "\x1b]0" not in printed and "\x07" not in printed and "\x9b" not in printed
    assert "evil\\x1b]0;title" in printed and "again\\x9b31m" in printed


def test_an_interrupt_during_an_import_is_not_swallowed() -> None:
    """Some modules catch every exception of what they import, and go on without it."""
    code = """
import os, signal, time
from moe_serve.cli.console import ending_at_interrupt
former = signal.getsignal(signal.SIGINT)
with ending_at_interrupt():
    pass
assert signal.getsignal(signal.SIGINT) is former
with ending_at_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except BaseException:
        pass
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, env=server_environment({}))
    assert ended.returncode == 130
