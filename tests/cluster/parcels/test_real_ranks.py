"""Parcels between ranks that run: pages arrive bit by bit, and a fault is told in one sentence."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from moe_serve.cluster.control.parcel_messages import TakePages
from moe_serve.cluster.control.secret import ClusterSecret
from moe_serve.cluster.members.rank_starter import LocalStarter
from moe_serve.cluster.ranks.shard_parcels import ShardParcels
from moe_serve.config.cells import CellsConfig, PageLinkName
from moe_serve.errors import ConfigError
from tests.support.cluster.fault_starter import Faults, FaultStarter
from tests.support.cluster.layouts import config
from tests.support.cluster.thread_starter import ThreadStarter
from tests.support.cluster.two_cells import RANK, SeenCaches, TwoCells, content, fill, two_cells

MEMORY = 8 * 2**20


@contextmanager
def cells_of(
    tp: tuple[int, int],
    link: PageLinkName,
    *make: Callable[[str, int, ClusterSecret, int], object],
) -> Iterator[TwoCells]:
    """`make`: the starters of the two cells; threads if left out."""
    configs = [config(1, 1, attention_tp=each, timeout_s=20.0) for each in tp]
    cells = CellsConfig(link=link, memory_bytes=MEMORY)
    starters = make or (ThreadStarter, ThreadStarter)
    with two_cells(configs, cells, starters) as made:  # type: ignore[arg-type]
        yield made
        made.settle()


@pytest.mark.parametrize(("source", "target"), [(1, 2), (4, 1)])
@pytest.mark.parametrize("link", ["shared", "tcp", "nixl"])
def test_pages_arrive(
    monkeypatch: pytest.MonkeyPatch, source: int, target: int, link: PageLinkName
) -> None:
    if link == "nixl":
        pytest.importorskip("nixl", reason="the optional package is not there")
    caches = SeenCaches(monkeypatch)
    with cells_of((source, target), link) as cells:
        assert cells.carrier.can_carry(cells.place(0), cells.place(1)) == ""
        ours, theirs = caches.of(0, source, 0), caches.of(1, target, source)
        fill(ours, 1)
        fill(theirs, 2)
        wanted = [content(ours, page) for page in (3, 200, 5)]
        kept = content(theirs, 9)
        end = cells.send([3, 200, 5], [8, 4, 7])
        assert end.is_sound, end.why
        assert [content(theirs, page) for page in (8, 4, 7)] == wanted
        assert content(theirs, 9) == kept
        cells.settle()
        free = cells.carrier.num_free(cells.place(1))
        parcels = [cells.parcel([page, page + 1], [page, page + 1]) for page in range(20, 40, 2)]
        for parcel in parcels:
            cells.carrier.send(parcel)
        assert [end.parcel for end in cells.wait(10)] == parcels
        cells.settle()
        assert cells.carrier.num_free(cells.place(1)) == free
        assert [content(theirs, page) for page in range(20, 40)] == [
            content(ours, page) for page in range(20, 40)
        ]


@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_a_wrong_checksum_reaches_no_page(
    monkeypatch: pytest.MonkeyPatch, link: PageLinkName
) -> None:
    """Also where only one of the target's shards sees it."""
    caches, load = SeenCaches(monkeypatch), ShardParcels.load

    def misread(shard: ShardParcels, order: TakePages) -> str:
        changed = (
            order if shard._wire is not theirs[1] else msgspec.structs.replace(order, checksum=1)
        )
        return load(shard, changed)

    with cells_of((1, 2), link) as cells:
        theirs = caches.of(1, 2, 1)
        fill(theirs, 2)
        monkeypatch.setattr(ShardParcels, "load", misread)
        end = cells.send([1, 2], [3, 4])
        assert re.fullmatch("attention-0 of cell 1 refused the pages: another shard .*", end.why)
        assert not any(content(theirs, 3)) and not any(content(theirs, 4))
        monkeypatch.setattr(ShardParcels, "load", load)
        assert cells.send([1, 2], [3, 4]).is_sound
        caches.of(0, 1, 0)[0]._pieces[0].tensor[2] = float("nan")
        end = cells.send([1, 2], [3, 4])
        assert end.why.endswith("refused the pages: some of their values are not finite")
        assert not any(content(theirs, 3))


@pytest.mark.parametrize("link", ["shared", "tcp"])
@pytest.mark.parametrize(
    ("owner", "moment", "gone"),
    [
        (ShardParcels, "save", 0),
        (ShardParcels, "load", 1),
    ],
)
def test_a_rank_that_dies(
    faults: Faults, owner: type, moment: str, gone: int, link: PageLinkName
) -> None:
    """Its parcels end, its slots come back, and the next process of the rank takes part."""

    def make(host: str, port: int, secret: ClusterSecret, num_threads: int) -> FaultStarter:
        return FaultStarter(faults, host, port, secret, num_threads)

    with cells_of((1, 1), link, make, make) as cells:
        faults.at(owner, moment, faults.die, rank=RANK)
        parcels = [cells.parcel([page], [page]) for page in (1, 2, 3)]
        for parcel in parcels:
            cells.carrier.send(parcel)
        ends = cells.wait(3)
        assert {end.why for end in ends} == {f"attention-0 of cell {gone} is lost"}
        cells.settle()
        assert cells.carrier.can_carry(cells.place(0), cells.place(1)).endswith("has not loaded.")
        while cells.carrier.can_carry(cells.place(0), cells.place(1)):
            cells.listen(0.05)
        assert cells.send([1], [2]).is_sound


def test_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go to a rank of two processes and come back as they were. One that is killed ends
    its parcels, and the next one takes part."""
    caches = SeenCaches(monkeypatch)
    with cells_of((1, 2), "shared", ThreadStarter, LocalStarter) as cells:
        ours = caches.of(0, 1, 0)
        fill(ours, 1)
        wanted = [content(ours, page) for page in (3, 200, 5)]
        assert cells.send([3, 200, 5], [8, 4, 7]).is_sound
        assert cells.send([7, 8, 4], [1, 2, 6], source=1).is_sound
        assert [content(ours, page) for page in (2, 6, 1)] == wanted
        starter = cells.cells[1]._starter
        assert isinstance(starter, LocalStarter)
        os.killpg(starter._processes.pid(RANK) or 0, signal.SIGSTOP)
        parcel = cells.parcel([1, 2], [3, 4])
        cells.carrier.send(parcel)
        cells.listen(0.2)
        assert not cells.carrier.take_ended()
        os.killpg(starter._processes.pid(RANK) or 0, signal.SIGKILL)
        assert [end.why for end in cells.wait(1)] == ["attention-0 of cell 1 is lost"]
        cells.settle()


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    why = (
        r"attention-0 cannot serve: cells\.link is 'nixl', but NIXL cannot be imported .*'auto'\.$"
    )
    with pytest.raises(ConfigError, match=why), cells_of((1, 1), "nixl"):
        pass
