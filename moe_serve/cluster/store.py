"""Where the ranks of a data group find each other, and on which interface they meet.

torch's store listens on every interface unless it is given a socket; this one is. Neither the store
nor gloo's pairs authenticate: they belong on a network that only the cluster can reach.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore  # torch.distributed does not declare it
from torch.distributed import DistError, DistNetworkError, ProcessGroupGloo

from moe_serve.cluster.listener import bound_socket
from moe_serve.errors import ClusterError, ConfigError


def serve_store(
    host: str, port: int, timeout_s: float, *, is_any_allowed: bool = False
) -> TCPStore:
    """The store itself, in this process; `store.port` is its port if `port` is 0.

    Listens on the interface of `host` only. `timeout_s` bounds each `get` and `wait`.
    """
    listening = bound_socket(host, port, is_any_allowed=is_any_allowed)
    address, chosen = listening.getsockname()[:2]
    try:
        return TCPStore(
            address,
            chosen,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),  # the store closes it
        )
    except DistError as error:
        raise ClusterError(f"cannot serve the store on {host} port {chosen}: {error}") from error


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """A connection to the store; raises ClusterError after `timeout_s`.

    Each member of a group needs its own: one that waits for a key lets nobody else in.
    """
    try:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except DistNetworkError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ClusterError(
            f"cannot reach the store on {host} port {port} within {timeout_s:g} s: {reason}."
        ) from error


def make_data_device(host: str) -> Any:
    """The gloo device whose pairs listen and connect on the interface of `host` only."""
    try:
        return ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"this machine cannot exchange data by the address {host}: {reason}."
        ) from error
