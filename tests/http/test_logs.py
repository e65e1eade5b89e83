"""Log lines for people or for programs, and an access log without secrets."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from moe_serve.cli.main import main
from moe_serve.config.logs import ACCESS_LOG, JsonFormatter, current_request, set_up_logs
from moe_serve.config.sections import LogConfig, ServerConfig
from moe_serve.config.sources import wants_json_log
from moe_serve.errors import ConfigError, printable
from moe_serve.http.app import Operations, create_app


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LogConfig], io.StringIO]]:
    """Sets up logs with a buffer as standard error, and restores the setup afterwards."""
    root, known = logging.getLogger(), logging.Logger.manager.loggerDict
    handlers, level = root.handlers[:], root.level
    levels = {name: item.level for name, item in known.items() if isinstance(item, logging.Logger)}

    def set_up(config: LogConfig) -> io.StringIO:
        buffer = io.StringIO()
        monkeypatch.setattr("sys.stderr", buffer)
        root.handlers = []  # pytest's own stay as they are
        set_up_logs(config)
        return buffer

    for module, hook in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, hook, getattr(module, hook))
    yield set_up
    logging.captureWarnings(False)
    root.handlers, root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    logging.getLogger(ACCESS_LOG).setLevel(logging.NOTSET)


def application(engine: Any, model: Any, log: LogConfig) -> FastAPI:
    return create_app(engine, model, ServerConfig(), operations=Operations(log=log))


def test_each_line_is_an_object(lines: Callable[[LogConfig], io.StringIO]) -> None:
    buffer = lines(LogConfig(format="json", level="info"))
    logger = logging.getLogger("moe_serve.test")
    logger.info("two\nlines and ü of %s", "me")
    logger.debug("not this one")
    token = current_request.set("req-7")
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("it failed")
    current_request.reset(token)
    first, second = map(json.loads, buffer.getvalue().splitlines())
    assert first["message"] == "two\nlines and ü of me"
    assert (first["level"], first["logger"]) == ("info", "moe_serve.test")
    assert first["time"].endswith("+00:00") and "request_id" not in first
    assert second["request_id"] == "req-7"
    assert second["exception"].startswith("Traceback") and "ValueError: odd" in second["exception"]


def test_what_python_writes_is_an_object_too(lines: Callable[[LogConfig], io.StringIO]) -> None:
    buffer = lines(LogConfig(format="json", level="error"))
    error = ValueError("odd")
    sys.excepthook(ValueError, error, None)
    thread = threading.Thread(target=lambda: [][0], name="fragile")
    thread.start()
    thread.join()
    sys.unraisablehook(SimpleNamespace(exc_value=error, err_msg=None, object="x"))  # type: ignore[arg-type]
    set_up_logs(LogConfig(format="json"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old ways", DeprecationWarning, stacklevel=1)
    entries = [json.loads(line) for line in buffer.getvalue().splitlines()]
    assert [entry["message"] for entry in entries[:3]] == [
        "uncaught: ValueError('odd')",
        "uncaught in thread fragile: IndexError('list index out of range')",
        "exception ignored in 'x': ValueError('odd')",
    ]
    assert [entry["level"] for entry in entries] == ["critical", "critical", "error", "warning"]
    assert "IndexError" in entries[1]["exception"] and "old ways" in entries[3]["message"]


@pytest.mark.parametrize(
    ("arguments", "variable", "message"),
    [
        (["serve", "--log-format", "json", "--host", "0.0.0.0"], "", "no API key is set"),
        (["serve", "--log-format", "json", "--port", "70000"], "text", "server.port cannot be 7"),
        (["serve", "--port", "70000"], "json", "server.port cannot be 70000 (command line)"),
        (["serve", "--config", "FILE"], "", "did you mean server.port?"),
        (["serve", "--log-format", "json", "no-such-folder", "--port", "0"], "", "is not a folder"),
        (["launch", "--config", "FILE", "m"], "", "did you mean server.port?"),
    ],
)
def test_a_failed_start_is_an_object(
    lines: Callable[[LogConfig], io.StringIO],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    variable: str,
    message: str,
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("server: {prot: 1}\nlog: {format: json}\n")
    monkeypatch.setenv("MOE_SERVE_LOG_FORMAT", variable)
    buffer = lines(LogConfig())
    with pytest.raises(SystemExit) as caught:
        main([str(file) if word == "FILE" else word for word in arguments])
    assert caught.value.code == 2
    (entry,) = map(json.loads, buffer.getvalue().splitlines())
    assert entry["level"] == "error" and message in entry["message"]


@pytest.mark.parametrize(
    "text", ["log: {format: text}", "log: 3", "- a", "log: [", "log: {format: [json]}", ""]
)
def test_where_the_format_is_not_told_it_is_text(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert not wants_json_log(flags={}, environ={}, file=file)
    assert not wants_json_log(
        flags={"log.format": "text"}, environ={"MOE_SERVE_LOG_FORMAT": "json"}
    )
    assert not wants_json_log(flags={}, environ={}, file=tmp_path / "missing.yaml")


def test_the_access_log_is_off_by_default(
    lines: Callable[[LogConfig], io.StringIO], engine: Any, model: Any
) -> None:
    for level in ("info", "debug"):
        log = LogConfig(level=level)  # type: ignore[arg-type]
        buffer = lines(log)
        TestClient(application(engine, model, log)).get("/v1/models")
        assert ACCESS_LOG not in buffer.getvalue()


def test_access_lines(lines: Callable[[LogConfig], io.StringIO], engine: Any, model: Any) -> None:
    log = LogConfig(format="json", access=True)  # at level warning: it has its own switch
    buffer = lines(log)
    client = TestClient(application(engine, model, log))
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer swordfish"}
    client.post("/v1/completions?key=swordfish", json={"prompt": "a"}, headers=headers)
    client.get("/nowhere/" + "x" * 500)
    client.get("/odd%0Aline%1b")
    for path in ("/health/live", "/health", "/metrics", "/ping"):
        client.get(path)
    entries = [json.loads(line) for line in buffer.getvalue().splitlines()]
    assert [entry["path"][:16] for entry in entries] == [
        "/v1/completions",
        "/nowhere/xxxxxxx",
        "/odd\\nline\\x1b",
    ]
    first = entries[0]
    assert (first["method"], first["status"], first["request_id"]) == ("POST", 200, "mine")
    assert 0 <= first["seconds"] < 60
    assert entries[1]["status"] == 404 and len(entries[1]["path"]) == 200
    assert "swordfish" not in buffer.getvalue()


def test_access_lines_as_text_and_other_exclusions(
    lines: Callable[[LogConfig], io.StringIO], engine: Any, model: Any
) -> None:
    log = LogConfig(access=True, access_exclude=())
    buffer = lines(log)
    TestClient(application(engine, model, log)).get("/ping", headers={"X-Request-Id": "p1"})
    assert "INFO moe_serve.http.access: GET /ping 200 " in buffer.getvalue()
    assert buffer.getvalue().endswith(" s p1\n")


def test_values_that_json_does_not_know() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "m", None, None)
    record.fields = {"what": {1, 2}.__class__}
    assert json.loads(JsonFormatter().format(record))["what"] == "<class 'set'>"


HOSTILE = "a\x1b[2J\x07\x9b31m\u202eb\r\n2026-01-01 00:00:00,000 ERROR moe_serve: forged"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_control_characters_reach_no_terminal(
    lines: Callable[[LogConfig], io.StringIO], log_format: Any
) -> None:
    """Messages and exceptions are cleaned, and a message is one line."""
    buffer = lines(LogConfig(format=log_format))
    logging.getLogger("moe_serve").error("%s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("moe_serve").exception("failed")
    text = buffer.getvalue()
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(text)
    assert text.count("\\x1b[2J") == 2, text
    if log_format == "text":
        first, second, *_ = text.splitlines()
        assert "forged" in first and second.endswith("ERROR moe_serve: failed")


def test_other_text_stays_as_it_is() -> None:
    text = "Grüße, 你好, café\u0301, \U0001f600, a\\b, tab\tand\nline"
    assert printable(text) == text and printable(printable(HOSTILE)) == printable(HOSTILE)
    assert printable("a\nb", keeps_lines=False) == "a\\nb"
    assert str(ConfigError("no \x1b[31m")) == "no \\x1b[31m"
