"""The store and the data device listen where they are told, and nowhere else."""

from __future__ import annotations

import gc
import socket
import threading
from datetime import timedelta

import psutil
import pytest
from torch.distributed import PrefixStore, ProcessGroupGloo

from moe_serve.cluster.store import connect_store, make_data_device, serve_store
from moe_serve.errors import ClusterError, ConfigError


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN}


def test_the_store_listens_on_the_given_address_only() -> None:
    before = listening()
    store = serve_store("127.0.0.1", 0, 5)
    assert listening() - before == {("127.0.0.1", store.port)}
    other = connect_store("127.0.0.1", store.port, 5)
    other.set("epoch", "3")
    assert store.get("epoch") == b"3"
    del other, store
    gc.collect()
    assert listening() <= before, "the store still listens"


def test_the_data_device_listens_on_the_given_address_only() -> None:
    """Two ranks of a gloo group in this process, on 127.0.0.2."""
    before = listening()
    store = serve_store("127.0.0.1", 0, 5)
    places: list[set[tuple[str, int]]] = []

    def join(rank: int) -> None:
        options = ProcessGroupGloo._Options()
        options._devices = [make_data_device("127.0.0.2")]
        options._timeout = timedelta(seconds=20)
        options._threads = 1
        own = PrefixStore("epoch 1", connect_store("127.0.0.1", store.port, 20))
        group = ProcessGroupGloo(own, rank, 2, options)
        places.append(listening())
        del group

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    new = {host for host, _ in (places[0] | places[1]) - before - {("127.0.0.1", store.port)}}
    assert new == {"127.0.0.2"}, f"a data group listens on {new}"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_every_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        serve_store(host, 0, 5)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        make_data_device("192.0.2.1")


def test_a_store_that_nobody_serves() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        port = unused.getsockname()[1]
        with pytest.raises(ClusterError, match=f"store on 127.0.0.1 port {port} within 0.2 s"):
            connect_store("127.0.0.1", port, 0.2)
