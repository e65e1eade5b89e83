"""Leaves with 0 when the server in this container is live: the HEALTHCHECK of the images.

Imports neither moe_serve nor torch, since it runs every few seconds. http.client knows no proxies.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0


def is_live(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_live(int(os.environ.get("MOE_SERVE_SERVER_PORT") or "8000")) else 1)
