"""Chooses the cell that reads a prompt, and the one that generates the answer.

    score = seconds until it is read: the work in front of it (with service tiers, the forecast of
            the queue), and its tokens that are not cached
          + the delay that reading it causes for the rows that decode there
          + transfer of the last pages that is not hidden        if another cell decodes
          + the time by which it lengthens the steps of the cell that decodes

Every rank's prefix tree is looked up, so the numbers of cached tokens are exact. The ranks of a
cell step together and often score alike. Then the rank with the fewest sequences is chosen,
because the busiest rank decides how long a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moe_serve.cluster.cells.places import CellLike, Place, places_of
from moe_serve.cluster.cells.rates import LinkRates, StepRates, work_of
from moe_serve.cluster.parcels.parcel import PageCarrier
from moe_serve.config.cells import CellRole, CellsConfig
from moe_serve.engine.request.sequence import Sequence as EngineSequence
from moe_serve.engine.service.step_model import StepWork

_MOST_LOAD = 1.5  # times the mean of its peers: then the second best place reads the prompt
_LEAST_PAGES = 2  # to be computed, for a hand-over


@dataclass(frozen=True, slots=True)
class Route:
    """The rank that reads a prompt, and the one that should generate its answer. A smaller `score`
    is better; `load_s` is the time of the work in front of the prompt; `num_held` are the numbers
    of sequences on the rank that generates and on the rank that reads."""

    reader: Place
    writer: Place
    score: float = 0.0
    load_s: float = 0.0
    num_held: tuple[int, int] = (0, 0)

    @property
    def is_hand_over(self) -> bool:
        return not self.reader.is_same(self.writer)

    @property
    def order(self) -> tuple[float, bool, tuple[int, int], tuple[int, str], tuple[int, str]]:
        """The sort key. Among equally good routes, one cell goes before two, then the ranks with
        fewer sequences, then the lower numbers and names."""
        is_two = self.is_hand_over
        return self.score, is_two, self.num_held, self.reader.order, self.writer.order


@dataclass(frozen=True, slots=True)
class _Offer:
    """The seconds that a sequence would cost on a rank.

    `queue_s`: the time until the rank reads it; `read_s`: the time to read it, with the delay of
    the rows that decode there; `more_s`: the delay that it then adds to all rows of a step, its own
    included; `num_held`: the number of sequences that run there already.
    """

    place: Place
    num_uncached: int
    queue_s: float
    read_s: float
    more_s: float
    num_held: int


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
        """Returns the route for a sequence without an engine; None if no cell is live."""
        places = self.open_places
        offers = self._offers(sequence, with_adapter(sequence, places) or places)
        if not offers:
            return None
        writers = _without_role(offers, "prefill")
        routes = self._hand_overs(sequence, offers, writers)
        if not routes or self._config.hand_over != "always":
            # Where a sequence was before, its pages may still be.
            alone = offers if sequence.num_output_tokens else writers
            routes += [self._route(offer, offer) for offer in alone]
        return _guarded(sorted(routes, key=lambda route: route.order))

    def targets(
        self, sequence: EngineSequence, source: Place, *, is_hand_over: bool = False
    ) -> list[Place]:
        """Returns the ranks to which a running sequence could move, the best first.
        `is_hand_over`: only to other cells, and to those that generate."""
        places = with_adapter(sequence, self.open_places)
        if is_hand_over:
            places = [p for p in places if p.cell is not source.cell]
            places = [p for p in places if p.cell.shape.role != "prefill"]
        works = self._works(places)
        found = [
            (self._more_s(sequence, place, works[place.cell.index]), num_held(place), place)
            for place in self._writers(places)
            if self._can_carry(source, place) and not self.is_draining(place)
        ]
        found.sort(key=lambda item: (item[0], item[1], item[2].order))
        return [place for *_, place in found]

    def _hand_overs(
        self, sequence: EngineSequence, offers: list[_Offer], writers: list[_Offer]
    ) -> list[Route]:
        """Returns the routes on which one cell reads the prompt and another one generates."""
        is_again = sequence.num_output_tokens > 0  # after a loss
        if self._config.hand_over == "off" or is_again or sequence.rules.max_tokens == 1:
            return []
        least = max(self._config.min_tokens, _LEAST_PAGES * sequence.page_size)
        return [
            self._route(reader, writer)
            for reader in _without_role(offers, "decode")
            for writer in writers
            if writer.num_uncached >= least and self._is_pair(reader.place, writer.place)
        ]

    def _is_pair(self, reader: Place, writer: Place) -> bool:
        """Returns whether one cell may read prompts for which the other one generates. Two cells
        with both roles read their own prompts.
        """
        roles = {reader.cell.shape.role, writer.cell.shape.role}
        return (
            reader.cell is not writer.cell and roles != {"both"} and self._can_carry(reader, writer)
        )

    def _route(self, reader: _Offer, writer: _Offer) -> Route:
        source, target = reader.place, writer.place
        score = reader.queue_s + reader.read_s + writer.more_s
        if source is not target:
            num_last = min(reader.num_uncached, self._steps.chunk_tokens)
            num_pages = -(-num_last // source.engine.moving.page_size)
            score += self._links.pages_s(source.at.cell, target.at.cell, num_pages)
        return Route(source, target, score, reader.queue_s, (writer.num_held, reader.num_held))

    def _offers(self, sequence: EngineSequence, places: Sequence[Place]) -> list[_Offer]:
        works = self._works(places)
        return [self._offer(sequence, place, works[place.cell.index]) for place in places]

    def _offer(self, sequence: EngineSequence, place: Place, work: StepWork) -> _Offer:
        moving, cell = place.engine.moving, place.cell
        num_uncached = sequence.num_tokens - moving.num_cached_tokens(sequence)
        queue_s = self._queue_s(sequence, place, num_uncached, work)
        read_s, delay_s = self._steps.prompt_s(cell, num_uncached, work)
        read_s += delay_s * work.num_decoding
        more_s = self._more_s(sequence, place, work)
        return _Offer(place, num_uncached, queue_s, read_s, more_s, num_held(place))

    def _queue_s(
        self, sequence: EngineSequence, place: Place, num_uncached: int, work: StepWork
    ) -> float:
        """Returns the seconds until a rank reads a sequence. With service tiers, those in front of
        it are the more urgent ones, and seats count."""
        service = place.engine.service
        if service is not None and service.state.model.is_measured:
            return service.forecast_s(sequence, num_uncached)[0]
        num_before = place.engine.moving.num_tokens_before(sequence.request.priority)
        return self._steps.prompt_s(place.cell, num_before, work)[0]

    def _more_s(self, sequence: EngineSequence, place: Place, work: StepWork) -> float:
        model, row = self._steps.model(place.cell), StepWork(1, 0, sequence.num_tokens)
        return (model.seconds(work + row) - model.seconds(work)) * (1 + work.num_decoding)

    def _works(self, places: Iterable[Place]) -> dict[int, StepWork]:
        """Returns the rows that decode in the cells of some ranks, by the cells' numbers."""
        cells = {place.cell.index: place.cell for place in places}
        return {index: work_of(cell) for index, cell in cells.items()}

    @staticmethod
    def _writers(places: list[Place]) -> list[Place]:
        """Returns the ranks of cells that generate, or all ranks if no cell does."""
        return [place for place in places if place.cell.shape.role != "prefill"] or places

    def _can_carry(self, source: Place, target: Place) -> bool:
        if source.is_same(target) or self._links.is_resting(source.at.cell, target.at.cell):
            return False
        return not self._carrier.can_carry(source.at, target.at)


def num_held(place: Place) -> int:
    """Returns the number of sequences that run on a rank or have a seat reserved there."""
    return len(place.engine.moving.running) + len(place.engine.moving.arriving)


def with_adapter(sequence: EngineSequence, places: list[Place]) -> list[Place]:
    """Returns the ranks in whose cells no rank has lost the adapter of a sequence."""
    adapter = sequence.request.adapter
    if adapter is None:
        return places
    return [place for place in places if not place.cell.lacks(adapter.weights.number)]


def _guarded(routes: list[Route]) -> Route:
    """Returns the best route, or the second best if the reader of the best one has far more to do
    than its peers: a popular prefix would draw all requests to it."""
    best = routes[0]
    role = best.reader.cell.shape.role
    peers = [route for route in routes if route.reader.cell.shape.role == role]
    loads = {route.reader.at: route.load_s for route in peers}
    if best.load_s <= _MOST_LOAD * sum(loads.values()) / len(loads):
        return best
    return next(route for route in peers if route.reader.at != best.reader.at)


def _without_role(offers: list[_Offer], role: CellRole) -> list[_Offer]:
    """Returns the offers of cells without a role, unless there are no other ones."""
    return [offer for offer in offers if offer.place.cell.shape.role != role] or offers
