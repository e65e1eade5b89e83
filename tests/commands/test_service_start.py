"""The start of a server: early refusals, a signal that stops it, and the release of its port."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from moe_serve.cli.main import main
from moe_serve.cli.serve import service
from moe_serve.cli.serve.serve import check_is_guarded
from moe_serve.cli.serve.service import ServiceStart
from moe_serve.config.sections import Config, ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.server import bind
from moe_serve.planning import plan_memory
from tests.support.server.server_process import port_of_ones_own


@pytest.fixture
def free_port() -> int:
    return port_of_ones_own()


@pytest.fixture(autouse=True)
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the log setup of the test's process and logs nothing."""
    monkeypatch.setattr(service, "set_up_logs", lambda _: None)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])


def end_by_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 60
    while time.monotonic() < end:  # whichever thread the signal interrupts
        time.sleep(0.01)


def is_taken(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_what_does_not_fit_is_refused_before_it_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setattr(plan_memory, "free_bytes", lambda _: 5 * 2**20)
    monkeypatch.setattr(service, "loading_bar", None)  # nothing is loaded
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--port", str(free_port), "--device", "cpu"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the model does not fit: weights take 31.4 MiB")
    assert "has 5.0 MiB free" in said and said.count("\n") == 1
    assert not is_taken(free_port)


def test_sigterm_calls_the_start_off(free_port: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = Config(server=ServerConfig(port=free_port))
    with pytest.raises(SystemExit) as caught, ServiceStart(config):
        assert is_taken(free_port)
        end_by_sigterm()
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not is_taken(free_port)


def test_the_listener_is_handed_over_open(free_port: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ServiceStart(Config(server=ServerConfig(port=free_port))) as start:
        listener = start.hand_over()
        assert is_taken(free_port), "who connects now waits in its queue"
        assert start.startup.phases[-1].name == "ready"
        assert listener.fileno() >= 0
        with pytest.raises(SystemExit):  # the next server does not listen to signals yet
            end_by_sigterm()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not is_taken(free_port)


def test_a_port_has_one_owner_before_anything_is_loaded(free_port: int) -> None:
    with bind("127.0.0.1", free_port), pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", free_port)


def test_a_start_that_fails_leaves_no_port(free_port: int, tmp_path: Path) -> None:
    for fields in ({"ssl_certfile": "none.pem"}, {"api_key_file": str(tmp_path / "none")}):
        config = Config(server=ServerConfig(port=free_port, **fields))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="none"), ServiceStart(config):
            raise AssertionError("it started")
        assert not is_taken(free_port)


def test_other_machines_need_a_key_or_a_word() -> None:
    with pytest.raises(ConfigError, match=r"or set server\.allow_open"):
        check_is_guarded(ServerConfig(host="0.0.0.0"))
    check_is_guarded(ServerConfig(host="0.0.0.0", allow_open=True))
    check_is_guarded(ServerConfig(host="0.0.0.0", api_key_file="keys"))
    check_is_guarded(ServerConfig(host="0.0.0.0", api_keys=("one",)))
