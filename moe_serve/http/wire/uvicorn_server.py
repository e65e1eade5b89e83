"""Our uvicorn server: its TLS certificates, and a shutdown that waits only for requests.

A certificate is loaded again when its files change.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.schema.file_watch import FileWatch
from moe_serve.http.wire.httptools_protocol import GuardedHttpToolsProtocol
from moe_serve.http.wire.transports import has_arrived
from moe_serve.regular_file import regular_file

_LOGGER = logging.getLogger(__name__)
_CERTIFICATE_LOOK_S = 1.0


class Tls:
    """The TLS contexts. New connections get a changed certificate; open ones keep theirs.

    Raises ConfigError if the files cannot be used at the start. Later, a file that cannot be used
    is logged and the certificate stays unchanged, also while only one of two files has been
    replaced.

    Loading into a context adds to its certificates (of other key types) and authorities. So each
    version has its own context, which connections of `context` are switched to.
    """

    def __init__(self, certfile: str, keyfile: str | None, ca_certs: str | None) -> None:
        self._certfile, self._keyfile, self._ca_certs = certfile, keyfile, ca_certs
        self._watch = FileWatch(path for path in (certfile, keyfile, ca_certs) if path is not None)
        self._next_look = 0.0
        self._newest = self._new_context()
        self.context = self._new_context()
        self.context.sni_callback = self._give_newest

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """Returns the configured TLS; None: plain HTTP."""
        if config.ssl_certfile is not None:
            return cls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        for name, path in (("keyfile", config.ssl_keyfile), ("ca_certs", config.ssl_ca_certs)):
            if path is not None:
                raise ConfigError(
                    f"server.ssl_{name} is {path}, but server.ssl_certfile is not set: HTTPS "
                    "needs the server's certificate."
                )
        return None

    def look(self) -> None:
        """Checks the files, at most once a second. Call it often."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _CERTIFICATE_LOOK_S
        if not self._watch.has_changed():
            return
        try:
            self._newest = self._new_context()
        except ConfigError as error:
            _LOGGER.error("the TLS certificate stays unchanged: %s", error)
        else:
            _LOGGER.warning("new connections use the changed certificate in %s", self._certfile)

    def _give_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        """Called in each handshake, also if the client sends no host name."""
        connection.context = self._newest

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            for path in (self._certfile, self._keyfile, self._ca_certs):
                if path is not None:
                    regular_file(Path(path))
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_password)
            if self._ca_certs is not None:
                context.load_verify_locations(self._ca_certs)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = ", ".join(p for p in (self._certfile, self._keyfile, self._ca_certs) if p)
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"the certificate or key for HTTPS cannot be used ({files}): {reason}."
            ) from error
        return context


def _no_password() -> str:
    """Raises instead of asking for a password on the terminal, which would block the server."""
    raise ValueError("the private key is encrypted, which is not supported")


CUT_GRACE_S = 5  # seconds for error events to reach their clients
_KEEP_ALIVE_S = 65  # seconds, longer than the idle time of usual client pools and load balancers
_LOOK_S = 0.1


def uvicorn_config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    """Returns the configuration for uvicorn. With `tls` None the server speaks plain HTTP."""

    def context(*_: object) -> ssl.SSLContext:
        assert tls is not None, "TLS is configured"
        return tls.context

    return uvicorn.Config(
        app,
        loop="auto",  # uvloop if it is installed
        http=GuardedHttpToolsProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_GRACE_S,
        ssl_context_factory=None if tls is None else context,
    )


class ClosingServer(uvicorn.Server):
    """A uvicorn server that waits only for requests when it shuts down.

    uvicorn gives connections some seconds to close by themselves. Over HTTPS closing needs an
    answer from the client, and an idle client (such as a connection pool) does not read. So
    connections that have sent everything are aborted.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        # Connections and tasks wait for requests. The listeners' own count (from Python 3.12 on,
        # without uvloop) also contains connections whose TLS handshake never ends.
        self.servers = []
        cutting = asyncio.create_task(self._cut_silent_connections())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_silent_connections(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in list(self.server_state.connections):
                transport = connection.transport
                if transport.is_closing() and has_arrived(transport):
                    transport.abort()
