"""The store and the data device listen where they are told, and let no stranger in."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistStoreError, PrefixStore

from moe_serve.cluster.control.meeting_store import (
    RemoteStore,
    StoreServer,
    connect_store,
)
from moe_serve.cluster.control.secret import new_secret
from moe_serve.errors import ClusterError, ConfigError
from moe_serve.pipeline.links.gloo_link import make_group
from moe_serve.pipeline.links.meeting import MeetingPlace, meeting_store

SECRET = new_secret()
# Becomes another user, then tries to set what calls meetings off, and to read what members tell.
STRANGER = """
import os, sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    port = int(sys.argv[1])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3))
    store.set("data-1/meeting/off", "-")
    print("has read", store.get("data-1/meeting/0"))
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
"""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, SECRET, 20)
    yield server
    server.close()


@pytest.fixture
def store(server: StoreServer) -> Iterator[RemoteStore]:
    store = connect_store("127.0.0.1", server.port, SECRET, 20)
    yield store
    store.close()


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(item.laddr) for item in connections if item.status == psutil.CONN_LISTEN}


def test_the_store_listens_on_the_given_address_only() -> None:
    before = listening()
    server = StoreServer("127.0.0.1", 0, SECRET, 5)
    assert listening() - before == {("127.0.0.1", server.port)}
    stores = [connect_store("127.0.0.1", server.port, SECRET, 5) for _ in range(2)]
    stores[0].set("epoch", "3")
    assert stores[1].get("epoch") == b"3"
    server.close()
    assert listening() <= before, "the store still listens"
    with pytest.raises(DistStoreError, match="the connection to the store has ended"):
        stores[0].get("epoch")
    assert stores[0].is_closed
    stores[1].close()


def test_another_secret_is_refused(server: StoreServer) -> None:
    with pytest.raises(ClusterError, match="secrets differ"):
        connect_store("127.0.0.1", server.port, new_secret(), 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_neither_reads_nor_calls_off(server: StoreServer, store: RemoteStore) -> None:
    """A user of the same host, with torch's own client."""
    mine = meeting_store(store, 1)
    mine.set("0", "where I am, and a token")
    command = [sys.executable, "-c", STRANGER, str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("refused:"), done.stdout + done.stderr
    assert mine.get("0") == b"where I am, and a token" and not mine.check(["off"])


def test_what_torch_asks_of_a_store(store: RemoteStore) -> None:
    inner = PrefixStore("epoch", store)
    inner.set("a", "1")
    assert inner.get("a") == b"1" == store.get("epoch/a")
    assert inner.check(["a"]) and not inner.check(["a", "b"])
    assert inner.compare_set("a", "2", "3") == b"1" and inner.get("a") == b"1"
    assert inner.compare_set("a", "1", "3") == b"3" and inner.get("a") == b"3"
    assert inner.compare_set("new", "", "4") == b"4"
    assert [inner.add("n", 2), inner.add("n", 3)] == [2, 5]
    assert inner.delete_key("new") and not inner.delete_key("new") and not inner.check(["new"])
    assert inner.clone().get("a") == b"3"
    with pytest.raises(DistStoreError, match=r"no rank has set epoch/b within 0\.05 s"):
        inner.wait(["a", "b"], timedelta(seconds=0.05))


def test_who_waits_hears_that_a_meeting_is_off(server: StoreServer, store: RemoteStore) -> None:
    """Also gloo's own rendezvous, which reads the keys of the same epoch; another goes on."""
    place, told = MeetingPlace(server, "127.0.0.1"), list[str]()

    def wait() -> None:
        with pytest.raises(DistStoreError) as error:
            PrefixStore("data-1", store).get("0/1")
        told.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)  # it waits; or comes later, with the same answer
    place.call_off(1)
    thread.join(15)
    assert told == ["the meeting was cancelled"]
    with pytest.raises(DistStoreError, match="cancelled"):
        meeting_store(store, 1).check(["off"])
    meeting_store(store, 11).set("0", "here")
    place.forget(1)
    assert meeting_store(store, 11).get("0") == b"here"
    assert not meeting_store(store, 1).check(["0"])
    place.forget(11)
    assert not server._values and not server._called_off, "what nobody needs any more"


def test_the_data_device_listens_on_the_given_address_only(server: StoreServer) -> None:
    """Two ranks of a gloo group in this process, on 127.0.0.2."""
    before = listening()
    places: list[set[tuple[str, int]]] = []

    def join(rank: int) -> None:
        own = connect_store("127.0.0.1", server.port, SECRET, 60)
        group = make_group(PrefixStore("epoch 1", own), rank, 2, "127.0.0.2", 60)
        places.append(listening())
        del group
        gc.collect()
        own.close()

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    new = {host for host, _ in (places[0] | places[1]) - before}
    assert new == {"127.0.0.2"}, f"a data group listens on {new}"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_every_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="means every interface"):
        StoreServer(host, 0, SECRET, 5)


def test_a_store_that_nobody_serves() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        port = unused.getsockname()[1]
        with pytest.raises(
            ClusterError,
            match=f"store in which ranks meet cannot be reached: .*port {port} within 0.2 s",
        ):
            connect_store("127.0.0.1", port, SECRET, 0.2)
