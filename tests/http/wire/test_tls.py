"""HTTPS with certificates that change while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from moe_serve.cli.chat import ChatClient
from moe_serve.cli.run_batch.batch_run import BatchTarget
from moe_serve.cli.top.top_source import TopSource
from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.app import create_app
from moe_serve.http.wire import transports, uvicorn_server
from moe_serve.http.wire.transports import (
    LEAST_TAKEN_BYTES,
    PatientTransport,
    has_arrived,
    num_arrived,
)
from moe_serve.http.wire.uvicorn_server import Tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes them")


EC = "ec -pkeyopt ec_paramgen_curve:prime256v1"


def make_pair(folder: Path, name: str, kind: str = EC) -> tuple[Path, Path]:
    """Makes a certificate for localhost and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = (
        f"openssl req -x509 -newkey {kind} -nodes -days 2 "
        f"-subj /CN={name} -addext subjectAltName=DNS:localhost,IP:127.0.0.1 "
        f"-keyout {key} -out {cert}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("pairs")
    return [make_pair(folder, name) for name in ("first", "second")]


def subject(port: int) -> str:
    """Returns the subject of the certificate that a new connection gets."""
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-subject"], input=pem, text=True, capture_output=True
    )
    return text.stdout.strip().rpartition("=")[2].strip()


def put(source: Path, target: Path) -> None:
    new = target.with_suffix(".new")
    shutil.copy(source, new)
    os.replace(new, target)


def test_a_new_certificate_is_taken_and_a_broken_one_is_not(
    pairs: list[tuple[Path, Path]],
    tmp_path: Path,
    engine: Any,
    model: Any,
    live_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(uvicorn_server, "_CERTIFICATE_LOOK_S", 0.0)
    cert, key = tmp_path / "server.crt", tmp_path / "server.key"
    shutil.copy(pairs[0][0], cert)
    shutil.copy(pairs[0][1], key)
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))
    with live_server(create_app(engine, model, config), engine, config) as live:
        trust = ssl.create_default_context(cafile=pairs[0][0])
        with httpx.Client(base_url=f"https://127.0.0.1:{live.port}", verify=trust) as client:
            answer = client.post("/v1/completions", json={"prompt": "hi"})
            assert answer.json()["choices"][0]["text"] == "Hello"
            assert subject(live.port) == "first"
            cert.write_text("no certificate")
            wait_until(lambda: "stays unchanged" in caplog.text)
            assert subject(live.port) == "first"
            put(pairs[1][0], cert)  # with the key of the other one
            wait_until(lambda: caplog.text.count("stays unchanged") >= 2)
            assert subject(live.port) == "first"
            put(pairs[1][1], key)
            wait_until(lambda: subject(live.port) == "second")
            assert client.get("/health").status_code == 200, "an open connection goes on"
        with pytest.raises(httpx.ConnectError):  # who trusted the first only
            httpx.get(f"https://127.0.0.1:{live.port}/health", verify=trust)
    assert "PRIVATE" not in caplog.text


def test_a_certificate_of_another_kind_takes_the_place_of_the_old_one(
    pairs: list[tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context holds one certificate of each kind, and would go on showing the old one."""
    monkeypatch.setattr(uvicorn_server, "_CERTIFICATE_LOOK_S", 0.0)
    rsa = make_pair(tmp_path, "rsa", "rsa:2048")
    for old, new in ((pairs[0], rsa), (rsa, pairs[0])):
        cert, key = tmp_path / "server.crt", tmp_path / "server.key"
        put(old[0], cert)
        put(old[1], key)
        served = Tls(str(cert), str(key), None)
        shake_hands(served.context, old[0])
        put(new[0], cert)
        put(new[1], key)
        served.look()
        shake_hands(served.context, new[0])


def test_an_authority_that_is_taken_away_lets_nobody_in(
    pairs: list[tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "_CERTIFICATE_LOOK_S", 0.0)
    (cert, key), other = pairs
    authorities = tmp_path / "authorities.crt"
    put(cert, authorities)
    served = Tls(str(cert), str(key), str(authorities))
    shake_hands(served.context, cert, pairs[0])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(served.context, cert, other)
    put(other[0], authorities)
    served.look()
    shake_hands(served.context, cert, other)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(served.context, cert, pairs[0])


def shake_hands(
    context: ssl.SSLContext, trusted: Path, shown: tuple[Path, Path] | None = None
) -> None:
    """Makes a client's handshake without a socket; raises the error of either side."""
    trust = ssl.create_default_context(cafile=trusted)
    if shown is not None:
        trust.load_cert_chain(*shown)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = trust.wrap_bio(to_client, to_server, server_hostname="localhost")
    sides = [client, server]
    for _ in range(10):
        for side in list(sides):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                sides.remove(side)
    assert not sides, "the handshake does not end"


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of what is left behind
def test_a_handshake_that_never_ends_delays_no_shutdown(
    pairs: list[tuple[Path, Path]],
    engine: Any,
    model: Any,
    live_server: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cert, key = pairs[0]
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))
    with live_server(create_app(engine, model, config), engine, config) as live:
        silent = socket.create_connection(("127.0.0.1", live.port))
        assert subject(live.port) == "first", "so the one before it is taken in as well"
        live.server.servers = [Listener(server) for server in live.server.servers]
    assert "timeout graceful shutdown exceeded" not in caplog.text
    silent.close()


def test_an_idle_connection_delays_no_shutdown(
    pairs: list[tuple[Path, Path]],
    engine: Any,
    model: Any,
    live_server: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The connection lies in a client's pool, where no reader sees that the server closes it."""
    cert, key = pairs[0]
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))
    trust = ssl.create_default_context(cafile=cert)
    client = httpx.Client(verify=trust)
    with live_server(create_app(engine, model, config), engine, config) as live:
        assert client.get(f"https://127.0.0.1:{live.port}/health").status_code == 200
    assert "timeout graceful shutdown exceeded" not in caplog.text
    client.close()


def test_what_has_not_arrived_is_not_cut() -> None:
    ours, theirs = socket.socketpair()
    transport = SimpleNamespace(
        get_extra_info=lambda _: ours, get_write_buffer_size=lambda: transport.unsent, unsent=0
    )
    assert has_arrived(transport)  # type: ignore[arg-type]
    transport.unsent = 1
    assert not has_arrived(transport)  # type: ignore[arg-type]
    transport.unsent = 0
    ours.sendall(b"not read yet")
    assert not has_arrived(transport)  # type: ignore[arg-type]
    theirs.recv(100)
    assert has_arrived(transport)  # type: ignore[arg-type]
    ours.close()
    assert not has_arrived(transport), "not told"  # type: ignore[arg-type]
    transport.get_extra_info = lambda _: None  # its protocol is told in the loop's next turn
    assert not has_arrived(transport)  # type: ignore[arg-type]
    theirs.close()


def test_what_the_client_took_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
        transport: Any = SimpleNamespace(get_extra_info=lambda _: ours)
        with theirs, ours:
            before = num_arrived(transport)
            ours.sendall(b"x" * 10_000)
            assert len(theirs.recv(10_000, socket.MSG_WAITALL)) == 10_000
            wait_until(lambda: num_arrived(transport) == before + 10_000)
            assert ours.getblocking(), "it is looked at, and not changed"
        assert num_arrived(transport) == 0, "it is gone"


@pytest.mark.parametrize(
    ("taken", "end", "at"),
    [(LEAST_TAKEN_BYTES, "close", 600), (LEAST_TAKEN_BYTES - 1, "abort", 60), (None, "close", 0)],
)
def test_an_answer_that_is_being_read_is_not_cut(
    run_in_virtual_time: Any,
    monkeypatch: pytest.MonkeyPatch,
    taken: int | None,
    end: str,
    at: int,
) -> None:
    """A client that reads `taken` bytes a minute has the whole answer after ten; None: it has read
    it already."""
    ends: list[tuple[str, float]] = []

    async def read() -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()

        def minutes() -> int:
            return int((loop.time() - begun) / 59.9)

        monkeypatch.setattr(transports, "has_arrived", lambda _: taken is None or minutes() >= 10)
        monkeypatch.setattr(transports, "num_arrived", lambda _: (taken or 0) * minutes())
        wrapped: Any = SimpleNamespace(
            close=lambda: ends.append(("close", loop.time() - begun)),
            abort=lambda: ends.append(("abort", loop.time() - begun)),
            is_closing=lambda: bool(ends),
        )
        transport = PatientTransport(wrapped, loop, 60.0)
        transport.close()
        assert transport.is_closing()
        await asyncio.sleep(700.0)

    run_in_virtual_time(read())
    ((how, when),) = ends
    assert how == end and abs(when - at) < 3


def test_a_connection_is_closed_when_its_answer_has_arrived(
    pairs: list[tuple[Path, Path]],
    engine: Any,
    model: Any,
    live_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole answer that takes longer than the time for closing would be cut by TLS."""
    has_all, num_looks = threading.Event(), 0

    def look(_: object) -> bool:
        nonlocal num_looks
        num_looks += 1
        return has_all.is_set()

    monkeypatch.setattr(transports, "has_arrived", look)
    cert, key = pairs[0]
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))
    trust = ssl.create_default_context(cafile=cert)
    with (
        live_server(create_app(engine, model, config), engine, config) as live,
        socket.create_connection(("127.0.0.1", live.port), timeout=60) as raw,
    ):
        client = trust.wrap_socket(raw, server_hostname="localhost")
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        wait_until(lambda: num_looks >= 3)
        (connection,) = live.server.server_state.connections
        assert connection.transport.is_closing()
        assert not connection.transport._wrapped.is_closing()
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # too late
        has_all.set()
        rest = []
        with contextlib.suppress(ConnectionError), client:
            while chunk := client.recv(65536):
                rest.append(chunk)
        assert b"HTTP/1.1" not in b"".join(rest), "what came too late is not answered"


class Listener:
    """Waits for all its connections, as listeners of Python 3.12 and later do."""

    def __init__(self, server: asyncio.Server) -> None:
        self.close = server.close

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


def test_our_commands_say_whom_they_do_not_trust(
    pairs: list[tuple[Path, Path]],
    engine: Any,
    model: Any,
    live_server: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cert, key = pairs[0]
    config = ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))

    async def check_batch(url: str) -> None:
        async with BatchTarget(url) as target:
            await target.check()

    def ask(url: str) -> None:
        with ChatClient(url, None) as chat:
            chat.model()

    def look(url: str) -> None:
        with TopSource(url, None) as source:
            source.fetch()

    asks = (ask, look, lambda url: asyncio.run(check_batch(url)))
    with live_server(create_app(engine, model, config), engine, config) as live:
        for command in asks:
            with pytest.raises(Exception, match="is not trusted here: set SSL_CERT_FILE"):
                command(f"https://127.0.0.1:{live.port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        for command in asks:
            command(f"https://127.0.0.1:{live.port}")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert.parent / "nowhere.crt"))
    with pytest.raises(ConfigError, match="SSL_CERT_FILE or SSL_CERT_DIR cannot be read: No such"):
        ask("https://127.0.0.1:1")


def test_clients_must_show_a_certificate(
    pairs: list[tuple[Path, Path]], engine: Any, model: Any, live_server: Callable[..., Any]
) -> None:
    (cert, key), (client_cert, client_key) = pairs
    config = ServerConfig(
        ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_ca_certs=str(client_cert)
    )
    with live_server(create_app(engine, model, config), engine, config) as live:
        url = f"https://127.0.0.1:{live.port}/health"
        nobody = ssl.create_default_context(cafile=cert)
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=nobody)
        known = ssl.create_default_context(cafile=cert)
        known.load_cert_chain(client_cert, client_key)
        assert httpx.get(url, verify=known).status_code == 200


def test_files_that_cannot_be_used(pairs: list[tuple[Path, Path]], tmp_path: Path) -> None:
    (cert, key), (_, other) = pairs
    for paths in ((tmp_path / "missing", None), (key, None), (cert, None), (cert, other)):
        texts = [None if path is None else str(path) for path in paths]
        with pytest.raises(ConfigError, match=f"cannot be used .*{paths[0]}"):
            Tls.of(ServerConfig(ssl_certfile=texts[0], ssl_keyfile=texts[1]))
    with pytest.raises(ConfigError, match=r"server\.ssl_certfile is not set"):
        Tls.of(ServerConfig(ssl_keyfile=str(key)))
    encrypted = tmp_path / "encrypted.key"
    command = f"openssl ec -in {key} -aes128 -passout pass:x -out {encrypted}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted, which is not supported"):
        Tls.of(ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(encrypted)))
    assert Tls.of(ServerConfig()) is None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
