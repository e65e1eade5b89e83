"""Loads adapters on all ranks of all cells, and drops them when no request holds them.

An adapter has a number on the ranks, the same in every cell, so a request keeps it when it moves.
It is usable when all ranks have answered. A rank that starts gets all adapters with its
configuration. A rank that was just loading gets the adapters that came meanwhile before it can get
rows. So every rank that gets rows has every adapter, unless it could not read one again: then other
cells run the requests for that adapter, and it is forgotten when no cell has it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from experts.virtual_experts import MAX_VIRTUAL_ID
from moe_serve.adapters.adapter_files import AdapterFiles
from moe_serve.adapters.registry import AdapterRegistry, open_registry
from moe_serve.cluster.control.adapter_messages import AdapterLoaded, DropAdapter, LoadAdapter
from moe_serve.cluster.control.rank_link import RankLink
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.roster import RankState, Roster
from moe_serve.config.adapter_config import AdapterConfig
from moe_serve.errors import CheckpointError
from moe_serve.model.stage.adapter_rows import AdapterWeights

_log = logging.getLogger(__name__)
_LOOK_S = 0.1  # seconds between two checks for ranks that are gone


@dataclass(slots=True)
class _Told:
    """The adapters that a process of a rank was told to load."""

    start: int  # number of the process
    numbers: set[int] = field(default_factory=set)


class CellAdapters:
    """The adapters of one cell, used by its membership."""

    def __init__(self, shared: ClusterAdapters, roster: Roster, cell: str) -> None:
        """`cell` is its name, which is empty for the only cell."""
        self._shared, self.roster, self.cell = shared, roster, cell
        self._told: dict[str, _Told] = {}  # by the ranks' names; guarded by `shared`
        self._missing: set[tuple[int, str]] = set()  # adapters that ranks have lost; likewise

    def lacks(self, number: int) -> bool:
        """Returns whether a rank of the cell has lost an adapter. Safe from any thread."""
        return any(number == lost for lost, _ in tuple(self._missing))

    def note(self, rank: str, report: AdapterLoaded) -> None:
        """Notes whether a rank has an adapter. `shared` is locked."""
        lost = {(report.number, rank)}
        self._missing = self._missing | lost if report.why is not None else self._missing - lost

    def orders_for(self, name: RankName) -> Sequence[LoadAdapter]:
        """Returns the adapters that a rank loads before it is ready."""
        with self._shared.orders as orders:
            self._told[str(name)] = _Told(self.roster[str(name)].num_starts, set(orders))
            return tuple(orders.values())

    def ready(self, name: str) -> None:
        """Tells a rank which adapters were added and dropped while it loaded."""
        with self._shared.orders as orders:
            state, told = self.roster[name], self._told_to(name)
            for number in told.numbers - orders.keys():
                state.send(DropAdapter(number=number))
            told.numbers &= orders.keys()
            for order in list(orders.values()):
                self.tell(state, msgspec.structs.replace(order, is_due=True))

    def heard(self, link: RankLink, report: AdapterLoaded) -> None:
        """Notes that a rank has an adapter, or has lost it. Called on the link's thread."""
        self._shared.heard(self, link, report)

    def leave(self) -> None:
        """Removes a closing cell: loads no longer wait for its ranks."""
        self._shared.leave(self)

    def tell(self, state: RankState, order: LoadAdapter) -> None:
        """Sends an order to a rank that does not have it yet. `shared` is locked."""
        numbers = self._told_to(str(state.name)).numbers
        if order.number not in numbers:
            numbers.add(order.number)
            state.send(order)

    def drop(self, number: int) -> None:
        """Tells the ranks that they no longer need an adapter. `shared` is locked."""
        self._missing = {lost for lost in self._missing if lost[0] != number}
        for state in self.roster.present():
            told = self._told_to(str(state.name))
            if number in told.numbers:
                told.numbers.discard(number)
                state.send(DropAdapter(number=number))

    def rank(self, name: str) -> str:
        """Returns the name of a rank in messages."""
        return f"{self.cell}/{name}" if self.cell else name

    def _told_to(self, name: str) -> _Told:
        """Returns the adapters that the current process of a rank was told to load."""
        start, told = self.roster[name].num_starts, self._told.get(name)
        if told is None or told.start != start:
            told = self._told[name] = _Told(start)
        return told


class _Orders:
    """The adapters that ranks must have, by number. A `with` block locks it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.by_number: dict[int, LoadAdapter] = {}

    def __enter__(self) -> dict[int, LoadAdapter]:
        self.changed.acquire()
        return self.by_number

    def __exit__(self, *_: object) -> None:
        self.changed.release()


class ClusterAdapters:
    """Any thread may load. The engine thread says which ranks start and become ready."""

    def __init__(self, num_experts: int, timeout_s: float) -> None:
        """`timeout_s` is the time that ranks have to load an adapter."""
        self._timeout_s = timeout_s
        self._numbers = itertools.cycle(range(1, MAX_VIRTUAL_ID // num_experts))
        self.orders = _Orders()  # guards the rest
        self._cells: list[CellAdapters] = []
        self._answers: dict[int, dict[str, AdapterLoaded]] = {}  # of loads under way
        self._is_closed = False
        self._on_missing: Callable[[bytes], None] = lambda digest: None  # a rank has it no longer
        # a queue, because the last reference to an adapter may end anywhere, even in this object
        self._unused: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=self._drop_unused, name="adapter-drops", daemon=True).start()

    def join(self, roster: Roster, cell: str = "") -> CellAdapters:
        """Adds the ranks of a cell, which must not have started. When they start, they get all
        adapters.
        """
        with self.orders:
            self._cells.append(CellAdapters(self, roster, cell))
            return self._cells[-1]

    def leave(self, cell: CellAdapters) -> None:
        """Removes a cell. Further calls have no effect."""
        with self.orders:
            self._cells = [each for each in self._cells if each is not cell]
            self.orders.changed.notify_all()

    def open(self, config: AdapterConfig) -> AdapterRegistry:
        """Loads the configured adapters on all ranks. Raises ConfigError."""
        registry = open_registry(config, self.build)
        self._on_missing = registry.discard
        return registry

    def build(self, files: AdapterFiles) -> AdapterWeights:
        """Makes all ranks load an adapter, and waits for them. Implements BuildAdapter: the weights
        stay on the ranks as long as the result is held. Raises CheckpointError.
        """
        with self.orders as orders:
            number = next(n for n in self._numbers if n not in orders)
            order = LoadAdapter(
                number=number, digest=files.digest, folder=str(files.folder.absolute())
            )
            orders[number], self._answers[number] = order, {}
            present: dict[str, RankLink] = {}
            for cell in self._cells:
                for state in cell.roster.present():
                    if state.link is not None:
                        present[cell.rank(str(state.name))] = state.link
                        cell.tell(state, order)
        try:
            answers = self._wait(number, present)
        except CheckpointError:
            self._unused.put(number)
            raise
        weights = AdapterWeights(
            digest=files.digest,
            layers=(),
            num_bytes=max(each.num_bytes for each in answers),
            kind=answers[0].kind,
            rank=max(each.rank for each in answers),
            number=number,
        )
        weakref.finalize(weights, self._unused.put, number)
        return weights

    def heard(self, cell: CellAdapters, link: RankLink, report: AdapterLoaded) -> None:
        """Handles a rank's report about an adapter. Called on the link's thread."""
        name = cell.rank(link.name)
        with self.orders as orders:
            answers, order = self._answers.get(report.number), orders.get(report.number)
            if answers is not None:
                answers[name] = report
                self.orders.changed.notify_all()
                return
            if order is not None:
                cell.note(link.name, report)
            is_gone = all(each.lacks(report.number) for each in self._cells)
        if report.why is not None and order is not None:
            _log.error("%s has lost the adapter in %s: %s", name, order.folder, report.why)
            if is_gone:
                self._on_missing(order.digest)

    def close(self) -> None:
        """Ends all waits."""
        with self.orders:
            self._is_closed = True
            self.orders.changed.notify_all()
        self._unused.put(None)

    def _wait(self, number: int, asked: Mapping[str, RankLink]) -> list[AdapterLoaded]:
        """Waits until the ranks have answered or are gone. Raises CheckpointError if one cannot
        load it."""
        deadline = time.monotonic() + self._timeout_s
        with self.orders:
            answers = self._answers[number]
            try:
                while any(n not in answers and not link.is_closed for n, link in asked.items()):
                    if self._is_closed or time.monotonic() > deadline:
                        late = ", ".join(sorted(asked.keys() - answers.keys()))
                        raise CheckpointError(
                            "the server ends."
                            if self._is_closed
                            else f"{late} did not load it in {self._timeout_s:g} s "
                            "(cluster.start_timeout_s)."
                        )
                    self.orders.changed.wait(_LOOK_S)
            finally:
                del self._answers[number]
        failed = [(name, each.why) for name, each in answers.items() if each.why is not None]
        if failed:
            name, why = failed[0]
            is_all = len(failed) == len(answers)
            raise CheckpointError(why if is_all else f"{name} cannot load it: {why}")
        if not answers:
            raise CheckpointError("no rank is connected that could load it: try again later.")
        return list(answers.values())

    def _drop_unused(self) -> None:
        while (number := self._unused.get()) is not None:
            with self.orders as orders:
                orders.pop(number, None)
                for cell in self._cells:
                    cell.drop(number)
