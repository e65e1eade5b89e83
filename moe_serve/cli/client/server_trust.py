"""Whose certificates the commands believe that ask a server, and what they say when it is none."""

from __future__ import annotations

import ssl

import httpx

from moe_serve.errors import ConfigError

_UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"  # OpenSSL's name, which httpx passes on as text


def trusted() -> ssl.SSLContext:
    """The usual authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR: also on the way to this
    machine, where the rest of the environment (proxies) does not count. Raises ConfigError."""
    try:
        return httpx.create_ssl_context(trust_env=True)
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the authorities of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {reason}."
        ) from error


def is_distrust(error: Exception) -> bool:
    """Somebody answers, with a certificate that nobody here knows."""
    return _UNVERIFIED in str(error)


def no_connection(url: str, error: Exception) -> str:
    """One sentence: why there is none."""
    if is_distrust(error):
        return (
            f"the certificate of {url} is not trusted here: set SSL_CERT_FILE to a file (PEM) of "
            "the authority that signed it."
        )
    return f"no server answers at {url}: start one with `moe-serve serve`."
