"""`moe-serve cells` against a server that answers as the real one does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_serve.cli import cells_commands
from moe_serve.cli.main import app
from moe_serve.errors import CellsError

Cell = dict[str, Any]


def cell(number: int, state: str, note: str = "", commands: tuple[str, ...] = ()) -> Cell:
    return {
        "name": f"cell-{number}", "state": state, "ranks": "1A1E", "role": "both", "running": 2,
        "waiting": 1, "kv_used": 0.25, "draining_ranks": [], "note": note,
        "commands": list(commands),
    }  # fmt: skip


class FakeServer:
    """Answers each request with the next of the lists of cells; the last one stays."""

    def __init__(self) -> None:
        self.lists: list[list[Cell]] = [[cell(0, "serving")]]
        self.asked: list[tuple[str, str, Any]] = []
        self.refusal: tuple[int, str] | None = None
        self.more: dict[str, Any] = {}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((method, path, body))
        if self.refusal is not None:
            return self.refusal[0], {"error": {"message": self.refusal[1]}}
        found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return 202, {"cell": found[-1], "cells": found, **self.more}


Run = Callable[..., Any]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def run(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, content = server.answer(self.command, self.path, body)
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setattr(cells_commands, "_POLL_S", 0.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listening.server_address[1]}"
        yield lambda *words: CliRunner().invoke(app, ["cells", *words, "--url", url])
        listening.shutdown()
        thread.join()


def test_the_list_has_nodes_and_the_last_word_of_autoscaling(server: FakeServer, run: Run) -> None:
    here = {"name": "0", "num_ranks": 2, "num_places": None, "is_there": True}
    away = {"name": "beta", "num_ranks": 1, "num_places": 4, "is_there": False}
    scaling = {"policy": "target", "wanted": {"both": 2}, "decisions": {}, "last": "it starts."}
    server.more = {"nodes": [here, away], "autoscale": scaling}
    server.lists = [[{**cell(0, "serving"), "nodes": ["0", "beta"]}]]
    lines = run("list").output.splitlines()
    assert lines[0].split()[-2:] == ["pages", "nodes"] and "0, beta" in lines[1]
    assert lines[-3:] == [
        "node 0 has 2 ranks",
        "node beta has 1 of 4 ranks, and is away",
        "autoscaling by target wants 2 both; last: it starts.",
    ]


def test_a_cell_is_added_and_the_command_waits_until_it_serves(
    server: FakeServer, run: Run
) -> None:
    server.lists = [[cell(0, "serving"), cell(1, state)] for state in ("starting", "serving")]
    result = run("add", "1A1E", "--number", "1")
    assert result.exit_code == 0 and "cell-1  serving  1A1E" in result.output, result.output
    body = {"shape": "1A1E", "number": 1, "by_hand": False, "node": None}
    assert server.asked == [("POST", "/admin/cells", body), ("GET", "/admin/cells", None)]


def test_the_commands_of_ranks_by_hand_are_shown(server: FakeServer, run: Run) -> None:
    waits = cell(1, "starting", "it waits for 1 ranks", ("python -m rank",))
    server.lists = [[cell(1, "starting")], [waits], [waits], [cell(1, "serving")]]
    result = run("add", "1A1E", "--by-hand")
    assert result.exit_code == 0 and result.output.count("    python -m rank\n") == 1
    server.lists = [[cell(1, "starting")], [waits]]
    assert "    python -m rank\n" in run("add", "1A1E", "--by-hand", "--no-wait").output


def test_a_failed_start_is_an_error_with_the_reason(server: FakeServer, run: Run) -> None:
    server.lists = [[cell(1, "starting")], [cell(1, "failed", "no room.")]]
    result = run("add", "1A1E")
    assert isinstance(result.exception, CellsError)
    assert str(result.exception) == "cell-1 could not start: no room."


def test_a_removal_waits_until_the_cell_is_gone(server: FakeServer, run: Run) -> None:
    gone = [cell(0, "serving")]
    server.lists = [[*gone, cell(1, state)] for state in ("leaving", "leaving", "stopping")]
    server.lists.append(gone)
    result = run("remove", "1")
    assert result.exit_code == 0 and "cell-1" not in result.output, result.output
    assert server.asked[0][:2] == ("DELETE", "/admin/cells/1")
    server.lists = [[cell(1, "leaving")], [cell(1, "serving")]]
    result = run("remove", "1")
    assert "its removal was cancelled" in str(result.exception)


def test_cells_and_ranks_drain(server: FakeServer, run: Run) -> None:
    for words in (("drain", "0"), ("undrain", "0"), ("drain", "cell-1/attention-0"), ("list",)):
        assert run(*words).exit_code == 0
    assert [path for _, path, _ in server.asked] == [
        "/admin/cells/0/drain", "/admin/cells/0/undrain",
        "/admin/ranks/cell-1/attention-0/drain", "/admin/cells",
    ]  # fmt: skip
    assert "is neither the number of a cell" in str(run("drain", "first").exception)
    server.refusal = 404, "There is no cell 9."
    assert "refused (404): There is no cell 9." in str(run("remove", "9").exception)
