"""Slots for the experts of a rank that are exchanged while it serves: the current ones, and staged
ones that will replace some of them.

A staged expert has a slot but serves no rows. `switch` puts it into service and frees the slots of
the experts it replaces. Nothing is copied or deallocated then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from experts.memory.slot_table import ExpertKey
from moe_kernels.interface.kernels import ExpertSlots, ExpertWeights, SlotBank


class SlotRoom:
    """Manages the slots of all layers; the bank of a layer is `banks[layer]`.

    `stage` may be called on any thread. All other methods are for the thread that serves rows,
    between two layers.
    """

    def __init__(self, slots: ExpertSlots, layers: Sequence[int], num_experts: int) -> None:
        self._slots = slots
        self.banks: dict[int, SlotBank] = {layer: slots.bank(num_experts) for layer in layers}
        self._free = list(range(slots.num_slots))
        self._serving: dict[ExpertKey, int] = {}  # the key has the model's layer number
        self._staged: dict[ExpertKey, int] = {}
        self._lock = threading.Lock()  # guards _free and _staged

    @property
    def slot_bytes(self) -> int:
        """Bytes of one packed expert."""
        return self._slots.slot_bytes

    @property
    def num_free(self) -> int:
        """Number of empty slots."""
        return len(self._free)

    def stage(
        self,
        layer: int,
        expert: int,
        weights: ExpertWeights,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Packs an expert into a free slot.

        Stages nothing if `is_cancelled` returns True before or after the packing. A caller that
        cancels and then drops the staged experts therefore leaves none behind.
        """
        if is_cancelled():
            return
        key = ExpertKey(layer, expert)
        with self._lock:
            assert key not in self._serving and key not in self._staged, (
                f"{key} is staged or serving already"
            )
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
        """Frees the slots of all staged experts."""
        with self._lock:
            self._drop_staged()

    def switch(self, held: Mapping[int, Collection[int]]) -> None:
        """Serves exactly these experts in these layers from now on; the layers' other experts are
        released.

        Raises AssertionError, before anything changes, if one of them is neither serving nor
        staged.
        """
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
        """Frees the staged slots; the caller holds the lock."""
        self._free += self._staged.values()
        self._staged.clear()

    def check_integrity(self) -> None:
        """Asserts that every slot is exactly one of free, staged or serving."""
        slots = [*self._free, *self._staged.values(), *self._serving.values()]
        assert sorted(slots) == list(range(self._slots.num_slots)), (
            f"every slot must be in use exactly once, got {sorted(slots)}"
        )
