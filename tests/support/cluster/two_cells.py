"""Two cells of ranks, 1A1E each, that have loaded, and a carrier between their attention ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from moe_serve.cache.kv_cache import KVCache
from moe_serve.cache.transfer.wire_pages import WirePages
from moe_serve.cluster.control.parcel_messages import ParcelReport
from moe_serve.cluster.control.rank_link import Gone
from moe_serve.cluster.control.secret import new_secret
from moe_serve.cluster.members.cluster_model import ClusterModel
from moe_serve.cluster.parcels.cell_ranks import RosterRanks
from moe_serve.cluster.parcels.link_setup import LinkSetup
from moe_serve.cluster.parcels.parcel import Lease, Parcel, ParcelEnd, RankPlace
from moe_serve.cluster.parcels.rank_carrier import RankCarrier
from moe_serve.cluster.started_ranks import MakeStarter, StartedRanks
from moe_serve.config.cells import CellsConfig
from moe_serve.config.sections import EngineConfig

RANK = "attention-0"
_LONGEST_S = 60.0  # of any test


class TwoCells:
    """Parcels go from cell 0 to cell 1 if not told otherwise."""

    def __init__(
        self, cells: Sequence[StartedRanks], link: LinkSetup, config: CellsConfig, timeout_s: float
    ) -> None:
        self.cells, self.link = cells, link
        self.ranks = RosterRanks({index: cell.roster for index, cell in enumerate(cells)})
        loaded = self.ranks.loaded(self.place(0))
        assert loaded is not None and loaded.parcels is not None
        page_bytes = loaded.parcels.page_bytes
        self.carrier = RankCarrier(config, self.ranks, page_bytes, timeout_s)
        self._num_leases = 0

    def place(self, cell: int) -> RankPlace:
        return self.ranks.place_of(cell, RANK)

    def parcel(self, pages: Sequence[int], places: Sequence[int], source: int = 0) -> Parcel:
        self._num_leases += 1
        return Parcel(
            lease=Lease(self._num_leases, 7),
            number=0,
            source=self.place(source),
            target=self.place(1 - source),
            source_pages=tuple(pages),
            target_pages=tuple(places),
        )

    def send(self, pages: Sequence[int], places: Sequence[int], source: int = 0) -> ParcelEnd:
        """Sends a parcel and waits for its end."""
        self.carrier.send(self.parcel(pages, places, source))
        return self.wait(1)[0]

    def wait(self, count: int) -> list[ParcelEnd]:
        """Passes the ranks' reports on until so many parcels have ended."""
        ended: list[ParcelEnd] = []
        deadline = time.monotonic() + _LONGEST_S
        while len(ended) < count:
            assert time.monotonic() < deadline, f"{len(ended)} of {count} parcels have ended"
            self.listen(0.01)
            ended += self.carrier.take_ended()
        return ended

    def settle(self) -> None:
        """Passes reports on until no parcel has slots."""
        deadline = time.monotonic() + _LONGEST_S
        while self.carrier._journeys:
            assert time.monotonic() < deadline, f"{self.carrier._journeys} keep their slots"
            self.listen(0.01)
        self.carrier.check_integrity()

    def listen(self, seconds: float) -> None:
        for index, cell in enumerate(self.cells):
            while (event := cell.membership.next_event(seconds / 2)) is not None:
                state = cell.roster[event.name]
                if isinstance(event.report, ParcelReport):
                    place = RankPlace(index, event.name, state.num_starts)
                    self.carrier.heard(place, event.report)
                elif isinstance(event.report, Gone):
                    self.carrier.rank_lost(RankPlace(index, event.name, state.lost_start))


@contextmanager
def two_cells(
    configs: Sequence[EngineConfig], cells: CellsConfig, starters: Sequence[MakeStarter]
) -> Iterator[TwoCells]:
    with ExitStack() as opened:
        link = LinkSetup(cells)
        opened.callback(link.close)
        started, secret = [], new_secret()
        for config, make_starter in zip(configs, starters, strict=True):
            ranks = StartedRanks(ClusterModel.read(config), link.setup, secret=secret)
            opened.callback(ranks.close)
            ranks.start(make_starter, None)
            started.append(ranks)
        yield TwoCells(started, link, cells, configs[0].cluster.timeout_s)


class SeenCaches:
    """The caches of ranks that are threads of this process, by cell and shard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[tuple[int, WirePages]] = []
        make = WirePages.__init__

        def made(
            wire: WirePages, cache: KVCache, num_heads: int, shard: int = 0, num_shards: int = 1
        ) -> None:
            make(wire, cache, num_heads, shard, num_shards)
            self._made.append((shard, wire))

        monkeypatch.setattr(WirePages, "__init__", made)

    def of(self, cell: int, count: int, before: int) -> list[WirePages]:
        """Returns the `count` shards of a cell; `before`: shards of the cells before it."""
        found = sorted(self._made[before : before + count], key=lambda item: item[0])
        assert len(found) == count, f"cell {cell} has {len(found)} shards"
        return [wire for _, wire in found]


def fill(shards: Sequence[WirePages], seed: int) -> None:
    """Writes numbers into all pages, the same for every shard of a head."""
    noise = torch.Generator().manual_seed(seed)
    whole: dict[tuple[int, ...], torch.Tensor] = {}
    for wire in shards:
        for number, piece in enumerate(wire._pieces):
            heads = piece.span.start
            shape = piece.tensor.shape
            key = (number, heads)
            if key not in whole:
                whole[key] = torch.randn(shape, generator=noise)
            piece.tensor.copy_(whole[key])


def content(shards: Sequence[WirePages], page: int) -> bytes:
    """Returns a page on the wire, as these shards hold it, after checking that copies agree."""
    memory = np.zeros((1, shards[0].num_bytes), dtype=np.uint8)
    for wire in shards:
        wire.save([page], [0], memory)
    return memory.tobytes()
