"""HTTPS: the server's certificate, read again when its files change."""

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
    """Connections that are made after a change get the new certificate; open ones keep theirs.

    Raises ConfigError where the files cannot be used. A changed file that cannot be used is logged,
    and the certificate stays as it was: also while only one of two files has been replaced.

    What is loaded into a context joins what is there: certificates with keys of another kind, and
    authorities. So each version has a context of its own, which connections of `context` are given.
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
        """As configured; None: plain HTTP."""
        if config.ssl_certfile is not None:
            return cls(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        for name, path in (("keyfile", config.ssl_keyfile), ("ca_certs", config.ssl_ca_certs)):
            if path is not None:
                raise ConfigError(
                    f"server.ssl_{name} is {path}, but there is no server.ssl_certfile: HTTPS "
                    "needs the server's certificate."
                )
        return None

    def look(self) -> None:
        """Called often; looks at the files once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if not self._watch.has_changed():
            return
        try:
            self._newest = self._new_context()
        except ConfigError as error:
            _LOGGER.error("the TLS certificate stays as it was: %s", error)
        else:
            _LOGGER.warning("new connections get the certificate that %s has now", self._certfile)

    def _give_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        """Called in each handshake, also where the client names no host."""
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
    """Instead of a question on the terminal, at which the server would wait."""
    raise ValueError("the private key is encrypted, which is not supported")
