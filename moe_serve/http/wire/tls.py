"""HTTPS: loads the server's certificate, and loads it again when its files change."""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError
from moe_serve.http.schema.file_watch import FileWatch
from moe_serve.regular_file import regular_file

_LOGGER = logging.getLogger(__name__)
_LOOK_S = 1.0


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
        """The configured TLS; None: plain HTTP."""
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
        """Checks the files at most once a second. To be called often."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
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
