"""The attention ranks of all cells, for the parts that route and move requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from moe_serve.cluster.parcels.parcel import RankPlace
from moe_serve.config.cells import CellShape
from moe_serve.engine.engine import Engine


class CellLike(Protocol):
    """The part of a cell that routing and moving use. `Cell` implements it."""

    @property
    def index(self) -> int: ...

    @property
    def shape(self) -> CellShape: ...

    @property
    def is_out(self) -> bool:
        """True while a thread waits for its ranks."""
        ...

    @property
    def is_live(self) -> bool:
        """True if it can compute steps."""
        ...

    @property
    def is_draining(self) -> bool:
        """True if its requests move away and it gets no new ones."""
        ...

    @property
    def rank_engines(self) -> Mapping[str, Engine]:
        """The engines of its attention ranks that are there, by the rank's name."""
        ...

    def lacks(self, adapter: int) -> bool:
        """Returns whether a rank has lost an adapter, which has this number on all ranks."""
        ...

    def place_of(self, rank: str) -> RankPlace:
        """Returns the place of an attention rank that is there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One process of an attention rank with its engine. A new process has another engine."""

    cell: CellLike
    rank: str
    engine: Engine
    at: RankPlace

    @property
    def is_there(self) -> bool:
        """False once the process is lost, even if the rank is back."""
        return self.cell.rank_engines.get(self.rank) is self.engine

    @property
    def order(self) -> tuple[int, str]:
        """The sort key of a place, so that ties are always decided in the same way."""
        return self.cell.index, self.rank

    def is_same(self, other: Place) -> bool:
        return self.engine is other.engine


def places_of(cells: Iterable[CellLike]) -> list[Place]:
    """Returns the attention ranks that are there."""
    return [
        Place(cell, rank, engine, cell.place_of(rank))
        for cell in cells
        for rank, engine in cell.rank_engines.items()
    ]
