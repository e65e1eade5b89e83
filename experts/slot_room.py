"""Memory for the experts of a rank that come and go: those it has, and some that it will have.

What is staged lies in a slot and serves no rows; `switch` makes it serve, and what goes leaves its
slot to the next. Nothing is copied or freed then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from experts.memory.slot_table import ExpertKey
from moe_kernels.interface.kernels import ExpertSlots, ExpertWeights, SlotBank


class SlotRoom:
    """A layer's bank is `banks[layer]`. `stage` may be called on any thread; all else is for the
    one that serves rows, between two layers' products."""

    def __init__(self, slots: ExpertSlots, layers: Sequence[int], num_experts: int) -> None:
        self._slots = slots
        self.banks: dict[int, SlotBank] = {layer: slots.bank(num_experts) for layer in layers}
        self._free = list(range(slots.num_slots))
        self._serving: dict[ExpertKey, int] = {}  # by the model's layer
        self._staged: dict[ExpertKey, int] = {}
        self._lock = threading.Lock()  # of the free and the staged

    @property
    def slot_bytes(self) -> int:
        """Of one packed expert."""
        return self._slots.slot_bytes

    @property
    def num_free(self) -> int:
        """Slots that nothing is in."""
        return len(self._free)

    def stage(
        self,
        layer: int,
        expert: int,
        weights: ExpertWeights,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Pack an expert into a free slot. Nothing is staged where `is_cancelled` says so by then:
        who cancels drops afterwards, and so finds all that ever is."""
        if is_cancelled():
            return
        key = ExpertKey(layer, expert)
        with self._lock:
            assert key not in self._serving and key not in self._staged, f"{key} is here already"
            assert self._free, f"no slot of {self._slots.num_slots} is free for {key}"
            slot = self._free.pop()
        try:
            self._slots.write(slot, weights)
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            if is_cancelled():
                self._free.append(slot)
            else:
                self._staged[key] = slot

    def drop_staged(self) -> None:
        """It is not needed after all."""
        with self._lock:
            self._drop_staged()

    def switch(self, held: Mapping[int, Collection[int]]) -> None:
        """These experts of these layers are here from now on; others of the layers go. Raises
        AssertionError, before anything changes, if one of them is not here."""
        wanted = {ExpertKey(layer, expert) for layer, ids in held.items() for expert in ids}
        going = [key for key in self._serving if key.layer in held and key not in wanted]
        with self._lock:
            missing = wanted - self._serving.keys() - self._staged.keys()
            some = next(iter(missing), None)
            assert some is None, f"{len(missing)} experts are not here, such as {some}"
            for key in going:
                self.banks[key.layer].point(key.expert, None)
                self._free.append(self._serving.pop(key))
            for key in wanted & self._staged.keys():
                slot = self._serving[key] = self._staged.pop(key)
                self.banks[key.layer].point(key.expert, slot)
            self._drop_staged()

    def _drop_staged(self) -> None:
        """Under the lock."""
        self._free += self._staged.values()
        self._staged.clear()

    def check_integrity(self) -> None:
        """Every slot is free, staged or serving, and only one of these."""
        slots = [*self._free, *self._staged.values(), *self._serving.values()]
        assert sorted(slots) == list(range(self._slots.num_slots)), f"slots are {sorted(slots)}"
