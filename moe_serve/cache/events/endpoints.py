"""The ZeroMQ addresses of the KV events: one for each attention rank, as in vLLM.

    tcp://*:5557        rank 1: tcp://*:5558
    ipc:///run/kv       rank 1: ipc:///run/kv_dp1

If the gateway listens, all ranks connect to its single address.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from moe_serve.config.event_config import AttachName, KVEventsConfig
from moe_serve.errors import ConfigError

_MAX_PORT = 65535
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|\*|[\w.-]+):(?P<port>[0-9]{1,5})")
_OTHER = re.compile(r"(ipc|inproc)://\S+")
_OWN_HOSTS = re.compile(r"\*|0\.0\.0\.0|127\.[0-9.]+|localhost|\[[0:]*:[01]?\]")


@dataclass(frozen=True, slots=True)
class EventAddress:
    """One address, as ZeroMQ writes it. `port` is None for addresses other than TCP."""

    address: str
    is_bound: bool  # False: the gateway listens there
    host: str | None
    port: int | None

    def for_rank(self, rank: int) -> EventAddress:
        """Returns the address of an attention rank; that of rank 0 is this one."""
        if not (rank and self.is_bound):
            return self
        if self.port is None:
            return EventAddress(f"{self.address}_dp{rank}", self.is_bound, None, None)
        port = self.port + rank
        return EventAddress(f"tcp://{self.host}:{port}", self.is_bound, self.host, port)


def read_endpoint(key: str, address: str, attach: AttachName) -> EventAddress:
    """Reads the address that is the value of `key`. Raises ConfigError."""
    match = _TCP.fullmatch(address)
    if match is not None and 0 < int(match["port"]) <= _MAX_PORT:
        is_own = bool(_OWN_HOSTS.fullmatch(match["host"]))
        is_bound = is_own if attach == "auto" else attach == "bind"
        return EventAddress(address, is_bound, match["host"], int(match["port"]))
    if _OTHER.fullmatch(address):
        return EventAddress(address, attach != "connect", None, None)
    raise ConfigError(
        f"{key} is {address!r}, and must be a ZeroMQ address such as tcp://127.0.0.1:5557, "
        "tcp://*:5557 (for other machines) or ipc:///run/moe-serve-events; a port is 1 to 65535."
    )


def event_endpoint(config: KVEventsConfig) -> EventAddress | None:
    """Returns the address at which rank 0 publishes; None if nothing is published."""
    if config.endpoint is None:
        return None
    return read_endpoint("kv_events.endpoint", config.endpoint, config.attach)


def replay_endpoint(config: KVEventsConfig) -> EventAddress | None:
    """Returns the address at which rank 0 answers requests for past events, which is always bound;
    None without one.
    """
    if config.replay_endpoint is None:
        return None
    return read_endpoint("kv_events.replay_endpoint", config.replay_endpoint, "bind")


def check_endpoints(config: KVEventsConfig, num_ranks: int) -> None:
    """Raises ConfigError if the address of a rank cannot be used: its port is too high, taken, or
    needed twice.
    """
    found = {
        "kv_events.endpoint": event_endpoint(config),
        "kv_events.replay_endpoint": replay_endpoint(config),
    }
    taken: dict[int, str] = {}
    for key, endpoint in found.items():
        if endpoint is None or endpoint.port is None or not endpoint.is_bound:
            continue
        if endpoint.port + num_ranks - 1 > _MAX_PORT:
            raise ConfigError(
                f"{key} is {endpoint.address!r}, and each of the {num_ranks} attention ranks takes "
                f"one port from there on: give a port of at most {_MAX_PORT - num_ranks + 1}."
            )
        for rank in range(num_ranks):
            address = endpoint.for_rank(rank)
            assert address.host is not None and address.port is not None, "a TCP address"
            if address.port in taken:
                raise ConfigError(
                    f"{key} is {endpoint.address!r}, and port {address.port} is also needed for "
                    f"{taken[address.port]}: with {num_ranks} attention ranks each takes "
                    f"{num_ranks} ports, so keep them at least that far apart."
                )
            taken[address.port] = key
            _check_free(key, address.host, address.port)


def check_port(key: str, endpoint: EventAddress, rank: int) -> None:
    """Raises ConfigError if an attention rank would need a port that is too high."""
    port = endpoint.for_rank(rank).port
    if port is not None and port > _MAX_PORT:
        raise ConfigError(
            f"{key} is {endpoint.address!r}, and attention rank {rank} takes the port {rank} "
            f"higher, but ports end at {_MAX_PORT}: give a lower one."
        )


def _check_free(key: str, host: str, port: int) -> None:
    name = {"*": "0.0.0.0"}.get(host, host.strip("[]"))
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((name, port))
    except socket.gaierror:
        return  # the name of a network interface, which only ZeroMQ knows
    except OSError as error:
        raise ConfigError(
            f"{key} cannot listen on port {port} of {host} ({error.strerror}): choose another "
            "address, or end the program that uses it."
        ) from None
