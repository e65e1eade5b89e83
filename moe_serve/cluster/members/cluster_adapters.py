"""Loads adapters on all ranks, and has them dropped when no request holds them.

An adapter has a number on the ranks. It is usable when all ranks have answered. A rank that starts
again gets all adapters with its configuration, and one that was just loading gets those that came
meanwhile before it can get rows.
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
from moe_serve.cluster.control.adapter_messages import AdapterLoaded, DropAdapter, LoadAdapter
from moe_serve.cluster.control.rank_link import RankLink
from moe_serve.cluster.control.rank_name import RankName
from moe_serve.cluster.members.roster import RankState, Roster
from moe_serve.errors import CheckpointError
from moe_serve.model.stage.adapter_rows import AdapterWeights

_log = logging.getLogger(__name__)
_LOOK_S = 0.1  # between two looks for ranks that are gone


@dataclass(slots=True)
class _Told:
    """The adapters that a process of a rank was told of."""

    start: int  # number of the process
    numbers: set[int] = field(default_factory=set)


class ClusterAdapters:
    """Any thread may load. The engine thread says which ranks start and become ready."""

    def __init__(self, roster: Roster, num_experts: int, timeout_s: float) -> None:
        """`timeout_s`: the time that ranks have to load an adapter."""
        self._roster, self._timeout_s = roster, timeout_s
        self._numbers = itertools.cycle(range(1, MAX_VIRTUAL_ID // num_experts))
        self._changed = threading.Condition()  # guards the rest
        self._orders: dict[int, LoadAdapter] = {}
        self._told: dict[str, _Told] = {}
        self._answers: dict[int, dict[str, AdapterLoaded]] = {}  # of loads under way
        self._is_closed = False
        self.on_missing: Callable[[bytes], None] = lambda digest: None  # a rank no longer has it
        # A queue, as the last reference to an adapter may end anywhere, also in this object.
        self._unused: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        threading.Thread(target=self._drop_unused, name="adapter-drops", daemon=True).start()

    def build(self, files: AdapterFiles) -> AdapterWeights:
        """Has all ranks load an adapter, and waits for them. Implements BuildAdapter: the weights
        are on the ranks, as long as the result is held. Raises CheckpointError."""
        with self._changed:
            number = next(n for n in self._numbers if n not in self._orders)
            order = LoadAdapter(
                number=number, digest=files.digest, folder=str(files.folder.absolute())
            )
            self._orders[number], self._answers[number] = order, {}
            present = {str(s.name): s.link for s in self._roster.present() if s.link is not None}
            for name in present:
                self._tell(self._roster[name], order)
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

    def orders_for(self, name: RankName) -> Sequence[LoadAdapter]:
        """Returns the adapters that a rank loads before it is ready."""
        with self._changed:
            self._told[str(name)] = _Told(self._roster[str(name)].num_starts, set(self._orders))
            return tuple(self._orders.values())

    def ready(self, name: str) -> None:
        """Tells a rank of the adapters that came and went while it loaded."""
        with self._changed:
            state, told = self._roster[name], self._told_to(name)
            for number in told.numbers - self._orders.keys():
                state.send(DropAdapter(number=number))
            told.numbers &= self._orders.keys()
            for order in list(self._orders.values()):
                self._tell(state, msgspec.structs.replace(order, is_due=True))

    def heard(self, link: RankLink, report: AdapterLoaded) -> None:
        """Notes that a rank has an adapter, or has lost it. Called on the link's thread."""
        with self._changed:
            answers, order = self._answers.get(report.number), self._orders.get(report.number)
            if answers is not None:
                answers[link.name] = report
                self._changed.notify_all()
                return
        if report.why is not None and order is not None:
            _log.error("%s has lost the adapter in %s: %s", link.name, order.folder, report.why)
            self.on_missing(order.digest)

    def close(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._unused.put(None)

    def _told_to(self, name: str) -> _Told:
        """Returns what the present process of a rank was told of."""
        start, told = self._roster[name].num_starts, self._told.get(name)
        if told is None or told.start != start:
            told = self._told[name] = _Told(start)
        return told

    def _tell(self, state: RankState, order: LoadAdapter) -> None:
        numbers = self._told_to(str(state.name)).numbers
        if order.number not in numbers:
            numbers.add(order.number)
            state.send(order)

    def _wait(self, number: int, asked: Mapping[str, RankLink]) -> list[AdapterLoaded]:
        """Waits until the ranks have answered or are gone. Raises CheckpointError if one cannot
        load it."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
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
                    self._changed.wait(_LOOK_S)
            finally:
                del self._answers[number]
        failed = next((each.why for each in answers.values() if each.why is not None), None)
        if failed is not None or not answers:
            raise CheckpointError(failed or "no rank is there to load it: try again later.")
        return list(answers.values())

    def _drop_unused(self) -> None:
        while (number := self._unused.get()) is not None:
            with self._changed:
                self._orders.pop(number, None)
                for state in self._roster.present():
                    told = self._told_to(str(state.name))
                    if number in told.numbers:
                        told.numbers.discard(number)
                        state.send(DropAdapter(number=number))
