"""Keeps routed experts of all layers within a budget of bytes; experts outside it are read when
rows need them.

L layers that have experts here, E experts, S slots, T rows, K choices per row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.expectation import Expectation, Hint, Transitions
from experts.memory.memory_policy import MemoryPolicy
from experts.memory.memory_stats import MemoryCounts, MemoryStats
from experts.memory.reader_threads import ReaderThreads
from experts.memory.slot_table import ExpertKey, SlotState, SlotTable
from moe_kernels.interface.kernels import ExpertSlots, ExpertWeights, SlotBank

_NUM_READERS = 1  # reader threads in addition to the thread that runs stages
# an expert is read ahead only if it is expected this many visits before the one it evicts
_MARGIN = 0.5
_BYTE = 255.0  # predictions arrive as uint8, where 255 is probability 1

ReadExpert = Callable[[int, int], ExpertWeights]  # (layer, expert); raises if it cannot be read
Ids = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Pass:
    """The part of a visit's choices whose experts are resident; the other choices are -1."""

    expert_ids_TK: Tensor
    is_all: bool


class ExpertMemory:
    """Makes experts resident in a limited number of slots: `visit` yields the rows that may run.

    One thread makes visits and other threads read ahead. Experts that rows wait for are read by all
    threads. The bank of a layer is `banks[layer]`. There must be at least two slots, one in use and
    one being read into.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        read: ReadExpert,
        layers: Sequence[int],
        num_experts: int,
        policy: MemoryPolicy,
    ) -> None:
        """`layers` lists the layers that have experts, in the order of their visits."""
        assert slots.num_slots >= 2, f"num_slots must be 2 or more, got {slots.num_slots}"
        self._slots, self._read, self._policy = slots, read, policy
        self._layers = tuple(layers)
        self._place = {layer: place for place, layer in enumerate(self._layers)}
        self.banks: dict[int, SlotBank] = {layer: slots.bank(num_experts) for layer in layers}
        shape = (len(self._layers), num_experts)
        self._held_LE = np.zeros(shape, dtype=bool)
        self._barred_LE = np.zeros(shape, dtype=bool)  # reading ahead failed; not tried again
        self._table = SlotTable(slots.num_slots, *shape)
        self._expectation, self._transitions = Expectation(*shape), Transitions(*shape)
        self._demands: deque[ExpertKey] = deque()
        self._failures: dict[ExpertKey, Exception] = {}
        self._seen: tuple[int, Ids] | None = None  # the visit from which to predict
        # [E]: experts predicted for the coming visit
        self._foretold: NDArray[np.bool_] | None = None
        self._counts = MemoryCounts()
        self._threads = ReaderThreads(self, _NUM_READERS)
        self._changed = self._threads.changed
        self._threads.start()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one packed expert."""
        return self._slots.slot_bytes

    @property
    def stats(self) -> MemoryStats:
        """A snapshot of the counters; may be read from any thread."""
        with self._changed:
            return self._counts.stats(
                budget_bytes=len(self._table) * self._slots.slot_bytes,
                resident_bytes=self._table.num_ready * self._slots.slot_bytes,
            )

    def hold(self, layer: int, experts: Sequence[int], *, is_held: bool = True) -> None:
        """Declares that rows may (or may no longer) be sent for these experts. Reads none of
        them.
        """
        with self._changed:
            self._held_LE[self._place[layer], list(experts)] = is_held
            self._changed.notify_all()

    def resident(self, layer: int) -> NDArray[np.bool_]:
        """Returns which experts of a layer are in memory now, [E]. Reads continue, so some may
        have left when they are used."""
        with self._changed:
            slots_E = self._table.slot_LE[self._place[layer]]
            is_ready_E = self._table.state_S[slots_E] == SlotState.READY
            resident_E: NDArray[np.bool_] = (slots_E >= 0) & is_ready_E
            return resident_E

    def hint(self, scores_LE: Hint | None) -> None:
        """Sets the probability [L, E] that the coming step needs an expert, known from its
        requests. It is kept until the next hint; None removes it."""
        with self._changed:
            self._expectation.hint(scores_LE)
            self._changed.notify_all()

    def foresee(self, layer: int, micro_batch: int, following_E: Bytes | None) -> None:
        """Announces which experts the next layer will need for a micro-batch, before the
        micro-batch visits this layer.

        `following_E` holds probabilities in units of 1/255. None and all zeros mean that there is
        no prediction.
        """
        if not self._policy.is_foreseeing:
            return
        place, expected_E = self._place[layer], None
        if following_E is not None and following_E.any():
            expected_E = following_E / _BYTE
        with self._changed:
            came_E = self._expectation.foresee(place, micro_batch, expected_E)
            self._foretold = None
            if came_E is not None:
                self._foretold = (came_E >= self._policy.confidence) & self._held_LE[place]
                self._counts.num_foretold += int(self._foretold.sum())
            if expected_E is not None:
                self._changed.notify_all()

    def close(self) -> None:
        """Ends the reader threads. No visit may follow."""
        self._threads.close()

    def visit(self, layer: int, expert_ids_TK: Tensor) -> Iterator[Pass]:
        """Yields one pass for each group of experts that fit into the slots together, at least one.

        An expert may be evicted as soon as the next pass is requested. An error of reading an
        expert is raised here.
        """
        place, ids_TK = self._place[layer], expert_ids_TK.cpu().numpy()
        num_rows_E = np.bincount(ids_TK.ravel() + 1, minlength=self._held_LE.shape[1] + 1)[1:]
        self._begin_visit(place, num_rows_E)
        rest = np.argsort(-num_rows_E, kind="stable")[: np.count_nonzero(num_rows_E)]
        is_first = True
        while is_first or len(rest):
            group = self._acquired(place, rest)
            if is_first and self._policy.is_prefetching:
                self._look_ahead(place, ids_TK)
            if len(group) == len(rest) and is_first:
                yield Pass(expert_ids_TK, is_all=True)
            elif len(group):
                chosen = torch.from_numpy(np.where(np.isin(ids_TK, group), ids_TK, -1))
                yield Pass(chosen.to(expert_ids_TK.device), is_all=False)
            rest, is_first = rest[~np.isin(rest, group)], False
            self._counts.num_passes += 1
        with self._changed:
            self._table.unpin_all()

    def next_read(self) -> ExpertKey | None:
        """Returns the expert to read now, if any. Called by the reader threads, with the lock
        held."""
        if self._demands:
            return self._demands.popleft()
        return self._claimed_ahead() if self._policy.is_prefetching else None

    def look_ahead(self) -> None:
        """Learns from the last visit and predicts the next one. Called by the reader threads."""
        seen, self._seen = self._seen, None
        if seen is None or not self._policy.is_predicting:
            return
        place, ids_TK = seen
        predicted_E = self._transitions.visit(place, ids_TK)
        with self._changed:
            self._expectation.predict(place, predicted_E)

    def fetch(self, key: ExpertKey) -> None:
        """Reads an expert into the slot that was claimed for it."""
        slot = int(self._table.slot_LE[key.layer, key.expert])
        try:
            weights = self._read(self._layers[key.layer], key.expert)
            self._slots.write(slot, weights)
        except BaseException as error:  # raised again by the visit that waits for this expert
            with self._changed:
                self._table.forget(slot)
                self._barred_LE[key.layer, key.expert] = True
                if isinstance(error, Exception):
                    self._failures[key] = error
                self._changed.notify_all()
            if not isinstance(error, Exception):
                # such as Ctrl-C: the slot is free again, so the next visit need not wait for it
                raise
            return
        with self._changed:
            self.banks[self._layers[key.layer]].point(key.expert, slot)
            self._table.state_S[slot] = SlotState.READY
            self._barred_LE[key.layer, key.expert] = False
            self._counts.num_reads += 1
            self._counts.bytes_read += self._slots.slot_bytes
            self._changed.notify_all()

    def _begin_visit(self, place: int, num_rows_E: Ids) -> None:
        needed = np.flatnonzero(num_rows_E)
        absent = needed[~self._held_LE[place, needed]]
        assert not len(absent), f"rows were sent for experts {absent.tolist()}, which are not here"
        table, counts = self._table, self._counts
        with self._changed:
            counts.num_visits += 1
            self._expectation.visit(place, num_rows_E > 0)
            slots = table.slot_LE[place, needed]
            is_ready = (slots >= 0) & (table.state_S[slots] == SlotState.READY)
            counts.num_needed += len(needed)
            if self._foretold is not None:
                counts.num_foreseen += int(self._foretold[needed].sum())
                self._foretold = None
            counts.num_hits += int(is_ready.sum())
            counts.num_late += int(((slots >= 0) & ~is_ready).sum())
            counts.num_rows += int(num_rows_E.sum())
            counts.num_row_hits += int(num_rows_E[needed[is_ready]].sum())
            ahead = slots[slots >= 0]
            counts.num_prefetch_hits += int(table.is_prefetched_S[ahead].sum())
            table.is_prefetched_S[ahead] = False
            table.pin(ahead, counts.num_visits)

    def _look_ahead(self, place: int, ids_TK: Ids) -> None:
        with self._changed:
            self._seen = (place, ids_TK)
            self._changed.notify_all()

    def _acquired(self, place: int, wanted: Ids) -> Ids:
        """Returns some of the wanted experts, resident and pinned, or all of them if they fit.
        Unpins the experts of the pass before.
        """
        since = time.perf_counter()
        with self._changed:
            group, claimed = self._pinned(place, wanted)
            self._demands.extend(claimed)
            if len(claimed) > 1:
                self._changed.notify_all()
        while claimed and (key := self._next_demand()) is not None:
            self.fetch(key)
        with self._changed:
            while self._is_loading(place, group):
                self._changed.wait()
            self._counts.wait_seconds += time.perf_counter() - since
            failed = [self._failures[key] for key in claimed if key in self._failures]
            self._failures.clear()
            if failed:
                self._table.unpin_all()
                raise failed[0]
            present: Ids = group[self._table.slot_LE[place, group] >= 0]
            return present

    def _pinned(self, place: int, wanted: Ids) -> tuple[Ids, list[ExpertKey]]:
        """Returns the experts of this pass, and those among them that must be read."""
        table, visit = self._table, self._counts.num_visits
        while True:
            table.unpin_all()
            slots = table.slot_LE[place, wanted]
            group = wanted[slots >= 0]
            table.pin(slots[slots >= 0], visit)
            missing = wanted[slots < 0]
            claimed = self._claimed(place, missing) if len(missing) else []
            group = np.concatenate((group, [key.expert for key in claimed])).astype(np.int64)
            if len(group) or not len(wanted):
                return group, claimed
            self._changed.wait()  # every slot is being read into

    def _claimed(self, place: int, missing: Ids) -> list[ExpertKey]:
        """Claims slots for as many missing experts as there are available slots."""
        until_LE = None if self._policy.is_lru else self._expectation.visits_until()
        claimed = []
        for expert in missing.tolist():
            found = self._table.last_expected(until_LE)
            if found is None:
                break
            claimed.append(ExpertKey(place, expert))
            self._claim(found[0], claimed[-1])
            self._table.pin([found[0]], self._counts.num_visits)
        return claimed

    def _claimed_ahead(self) -> ExpertKey | None:
        """Claims a slot for the absent expert that is expected first, if an expert that is expected
        later can be evicted.
        """
        expectation, table = self._expectation, self._table
        if 2 * table.num_loading >= len(table):
            return None
        until_LE = expectation.visits_until()
        is_absent_LE = self._held_LE & (table.slot_LE < 0) & ~self._barred_LE
        until = np.where(is_absent_LE, until_LE, np.inf)
        place, expert = np.unravel_index(until.argmin(), until.shape)
        found = table.last_expected(until_LE)
        if found is None or not np.isfinite(until[place, expert]):
            return None
        slot, freed = found
        p = expectation.probability[place, expert]
        is_sure = p >= self._policy.confidence or np.isinf(freed)
        if not is_sure or until[place, expert] + _MARGIN >= freed:
            return None
        key = ExpertKey(int(place), int(expert))
        self._claim(slot, key)
        self._counts.num_prefetched += 1
        table.is_prefetched_S[slot] = True
        return key

    def _claim(self, slot: int, key: ExpertKey) -> None:
        self._failures.pop(key, None)
        before = self._table.claim(slot, key)
        if before is not None:
            self.banks[self._layers[before.layer]].point(before.expert, None)

    def _next_demand(self) -> ExpertKey | None:
        with self._changed:
            return self._demands.popleft() if self._demands else None

    def _is_loading(self, place: int, group: Ids) -> bool:
        slots = self._table.slot_LE[place, group]
        return bool((self._table.state_S[slots[slots >= 0]] == SlotState.LOADING).any())
