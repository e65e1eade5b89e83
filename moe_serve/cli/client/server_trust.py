"""Which TLS certificates the client commands trust, and the message when there is no connection."""

from __future__ import annotations

import ssl

import httpx

from moe_serve.errors import ConfigError

_UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"  # OpenSSL's name, which httpx passes on as text


def trusted() -> ssl.SSLContext:
    """Returns the usual certificate authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR.

    These variables apply also to servers on this machine, for which the rest of the environment
    (proxies) is ignored. Raises ConfigError.
    """
    try:
        return httpx.create_ssl_context(trust_env=True)
    except OSError as error:  # ssl.SSLError is an OSError
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the authorities of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {reason}."
        ) from error


def is_distrust(error: Exception) -> bool:
    """Whether the server answered with a certificate that this machine does not trust."""
    return _UNVERIFIED in str(error)


def no_connection(url: str, error: Exception) -> str:
    """Returns one sentence with the reason why there is no connection."""
    if is_distrust(error):
        return (
            f"the certificate of {url} is not trusted here: set SSL_CERT_FILE to a file (PEM) of "
            "the authority that signed it."
        )
    return f"no server answers at {url}: start one with `moe-serve serve`."
