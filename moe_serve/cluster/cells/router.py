"""Chooses the cell that reads a prompt, and the one that generates the answer.

    score = seconds until it is read: those in front of it, and its tokens that are not cached
          + what reading it costs the rows that decode there
          + transfer of the last pages that is not hidden        if another cell decodes
          + the time by which it lengthens the steps of the cell that decodes

Every rank's prefix tree is looked up, so the numbers of cached tokens are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_serve.cluster.cells.parcel import PageCarrier, RankPlace
from moe_serve.cluster.cells.places import CellLike, Place, places_of
from moe_serve.cluster.cells.rates import LinkRates, StepRates, work_of
from moe_serve.config.cells import CellsConfig
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.step_model import StepWork

_MOST_LOAD = 1.5  # times the mean of its peers: then the second best place reads the prompt
_LEAST_PAGES = 2  # to be computed, for a hand-over


@dataclass(frozen=True, slots=True)
class Route:
    """The rank that reads a prompt, and the one that should generate its answer. A smaller `score`
    is better."""

    reader: Place
    writer: Place
    score: float = 0.0

    @property
    def is_hand_over(self) -> bool:
        return not self.reader.is_same(self.writer)


class CellRouter:
    """Reads the engines of all cells; changes nothing."""

    def __init__(
        self,
        cells: Sequence[CellLike],
        carrier: PageCarrier,
        config: CellsConfig,
        steps: StepRates,
        links: LinkRates,
    ) -> None:
        self._cells, self._carrier, self._config = cells, carrier, config
        self._steps, self._links = steps, links
        self.draining: set[tuple[int, str]] = set()  # ranks, by cell and name

    def is_draining(self, place: Place) -> bool:
        return place.cell.is_draining or place.order in self.draining

    @property
    def open_places(self) -> list[Place]:
        """The ranks that take requests. Those that drain are used if there are no others."""
        live = places_of(cell for cell in self._cells if cell.is_live)
        return [place for place in live if not self.is_draining(place)] or live

    def route(self, sequence: EngineSequence) -> Route | None:
        """Returns where a sequence without an engine should be computed; None if no cell is
        live."""
        places = self.open_places
        if not places:
            return None
        cached = {place.at: place.engine.moving.num_cached_tokens(sequence) for place in places}
        uncached = {at: sequence.num_tokens - count for at, count in cached.items()}
        writers = _with_role(places, "prefill")
        routes = self._hand_overs(sequence, places, writers, uncached)
        if not routes or self._config.hand_over != "always":
            is_again = sequence.num_output_tokens > 0  # where it was may have its pages
            alone = places if is_again else writers
            routes += [self._scored(sequence, place, place, uncached) for place in alone]
        return self._guarded(sequence, sorted(routes, key=_rank))

    def targets(self, sequence: EngineSequence, source: Place) -> list[Place]:
        """Returns the ranks to which a running sequence could move, the best first."""
        writers = _with_role(self.open_places, "prefill")
        found = [p for p in writers if self._can_carry(source, p) and not self.is_draining(p)]

        def cost(place: Place) -> tuple[float, tuple[int, str]]:
            return self._lengthening_s(place, sequence), place.order

        return sorted(found, key=cost)

    def _hand_overs(
        self,
        sequence: EngineSequence,
        places: list[Place],
        writers: list[Place],
        uncached: Mapping[RankPlace, int],
    ) -> list[Route]:
        """Returns the routes on which one cell reads the prompt and another one generates."""
        is_done = sequence.num_output_tokens > 0  # it is computed again, after a loss
        if self._config.hand_over == "off" or is_done or sequence.rules.max_tokens == 1:
            return []
        routes = []
        for reader in _with_role(places, "decode"):
            for writer in writers:
                is_pair = {reader.cell.shape.role, writer.cell.shape.role} != {"both"}
                least = max(self._config.min_tokens, _LEAST_PAGES * reader.engine.moving.page_size)
                if not is_pair or reader.cell is writer.cell or uncached[writer.at] < least:
                    continue
                if self._can_carry(reader, writer):
                    routes.append(self._scored(sequence, reader, writer, uncached))
        return routes

    def _scored(
        self,
        sequence: EngineSequence,
        reader: Place,
        writer: Place,
        uncached: Mapping[RankPlace, int],
    ) -> Route:
        num_tokens = uncached[reader.at]
        own_s = self._steps.prompt_s(reader.cell, num_tokens)
        num_rows = work_of(reader.cell).num_decoding
        score = self._queue_s(sequence, reader) + own_s * (1 + num_rows)
        if not reader.is_same(writer):
            size = reader.engine.moving.page_size
            num_last = -(-min(num_tokens, self._steps.chunk_tokens) // size)
            score += self._links.pages_s(reader.cell.index, writer.cell.index, num_last)
        return Route(reader, writer, score + self._lengthening_s(writer, sequence))

    def _queue_s(self, sequence: EngineSequence, place: Place) -> float:
        """Predicts the seconds until a rank begins to read a sequence."""
        num_tokens = place.engine.moving.num_tokens_before(sequence.request.priority)
        return self._steps.prompt_s(place.cell, num_tokens)

    def _lengthening_s(self, place: Place, sequence: EngineSequence) -> float:
        """Predicts by how many seconds one more sequence delays all rows of a step, its own
        included."""
        cell, row = place.cell, StepWork(1, 0, sequence.num_tokens)
        more_s = self._steps.step_s(cell, row) - self._steps.step_s(cell)
        return more_s * (1 + work_of(cell).num_decoding)

    def _guarded(self, sequence: EngineSequence, routes: list[Route]) -> Route:
        """Returns the best route, or the second best if the reader of the best one has far more to
        do than its peers: a popular prefix would draw all requests to it."""
        best = routes[0]
        peers = {
            route.reader.at: route
            for route in reversed(routes)
            if route.reader.cell.shape.role == best.reader.cell.shape.role
        }
        loads = {at: self._queue_s(sequence, route.reader) for at, route in peers.items()}
        if loads[best.reader.at] <= _MOST_LOAD * sum(loads.values()) / len(loads):
            return best
        return next(r for r in routes if r.reader.at in peers and r.reader.at != best.reader.at)

    def _can_carry(self, source: Place, target: Place) -> bool:
        if source.is_same(target) or self._links.is_resting(source.at.cell, target.at.cell):
            return False
        return not self._carrier.can_carry(source.at, target.at)


def _with_role(places: Iterable[Place], unwanted: str) -> list[Place]:
    """Returns the places without those of an unwanted role, unless no other ones are left."""
    places = list(places)
    return [place for place in places if place.cell.shape.role != unwanted] or places


def _rank(route: Route) -> tuple[float, bool, tuple[int, str], tuple[int, str]]:
    """Orders routes; among equal ones, one cell before two, then by number and name."""
    return route.score, route.is_hand_over, route.reader.order, route.writer.order
