"""Exits with 0 if the server in this container is live: the HEALTHCHECK of the images.

It runs every few seconds, so it imports neither moe_serve nor torch. http.client ignores proxies.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
from collections.abc import Mapping

TIMEOUT_S = 4.0


def is_live(environ: Mapping[str, str]) -> bool:
    port = int(environ.get("MOE_SERVE_SERVER_PORT") or "8000")
    is_tls = bool(environ.get("MOE_SERVE_SERVER_SSL_CERTFILE"))
    connection = _tls_connection(port) if is_tls else _plain_connection(port)
    try:
        connection.connect()
        if is_tls and environ.get("MOE_SERVE_SERVER_SSL_CA_CERTS"):
            return True  # without a client certificate the server allows only a handshake
        connection.request("GET", "/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _plain_connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)


def _tls_connection(port: int) -> http.client.HTTPConnection:
    """Returns a connection that does not verify the certificate.

    The certificate is for the server's names and not for this address, and nothing secret is sent.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)


if __name__ == "__main__":
    sys.exit(0 if is_live(os.environ) else 1)
