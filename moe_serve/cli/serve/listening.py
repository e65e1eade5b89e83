"""Checks that the server may listen at its address, before the model is loaded."""

from __future__ import annotations

import errno
import ipaddress
import socket

from moe_serve.config.sections import ServerConfig
from moe_serve.errors import ConfigError


def check_is_guarded(server: ServerConfig) -> None:
    """Raises ConfigError if other machines could reach the server without an API key."""
    if not (is_loopback(server.host) or server.has_api_keys or server.allow_open):
        raise ConfigError(
            f"server.host {server.host} is open to other machines, but no API key is set: "
            "add --api-key KEY (or @FILE), or listen on 127.0.0.1, or set server.allow_open "
            "(MOE_SERVE_SERVER_ALLOW_OPEN=true) to serve without a key."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_can_listen(server: ServerConfig) -> None:
    """Binds the address once and releases it, so that a taken port is reported before the model is
    loaded."""
    where = f"{server.host} port {server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError(
            f"server.host {server.host} is not an address: {error.strerror}."
        ) from error
    except UnicodeError as error:  # an empty label, as in 127..0.1, or one that is too long
        raise ConfigError(f"server.host {server.host} is not an address or a host name.") from error
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "another program listens there; stop it, or choose --port",
            errno.EADDRNOTAVAIL: "this machine does not have that address; choose --host",
            errno.EACCES: "ports below 1024 need privileges; choose --port",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f"cannot listen on {where}: {reason}.") from error
