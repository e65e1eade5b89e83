"""The table of which expert is in which slot, and which slots may be reused. Has no lock; its owner
locks.

L layers, E experts, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from experts.memory.expectation import Scores


class SlotState(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class ExpertKey:
    """An expert of a layer; `layer` is the position among the sparse layers."""

    layer: int
    expert: int


class SlotTable:
    """The state of S slots. A slot that is pinned or being read into must not be reused."""

    def __init__(self, num_slots: int, num_layers: int, num_experts: int) -> None:
        self.slot_LE = np.full((num_layers, num_experts), -1, dtype=np.int64)
        self._layer_S = np.full(num_slots, -1, dtype=np.int64)
        self._expert_S = np.full(num_slots, -1, dtype=np.int64)
        self.state_S = np.full(num_slots, SlotState.FREE, dtype=np.int8)
        self._pinned_S = np.zeros(num_slots, dtype=bool)
        # the number of the visit that used the slot last
        self._used_S = np.zeros(num_slots, dtype=np.int64)
        self.is_prefetched_S = np.zeros(num_slots, dtype=bool)  # prefetched and not needed yet

    def __len__(self) -> int:
        return len(self.state_S)

    @property
    def num_ready(self) -> int:
        return int((self.state_S == SlotState.READY).sum())

    @property
    def num_loading(self) -> int:
        return int((self.state_S == SlotState.LOADING).sum())

    def unpin_all(self) -> None:
        self._pinned_S[:] = False

    def pin(self, slots: NDArray[np.int64] | Sequence[int], visit: int) -> None:
        self._pinned_S[slots] = True
        self._used_S[slots] = visit

    def occupant(self, slot: int) -> ExpertKey | None:
        layer = int(self._layer_S[slot])
        return None if layer < 0 else ExpertKey(layer, int(self._expert_S[slot]))

    def claim(self, slot: int, key: ExpertKey) -> ExpertKey | None:
        """Reserves a slot for an expert that will be read; returns the expert that it replaces, if
        any."""
        assert self.slot_LE[key.layer, key.expert] < 0, f"{key} has a slot already"
        before = self.occupant(slot)
        if before is not None:
            self.slot_LE[before.layer, before.expert] = -1
        self._layer_S[slot], self._expert_S[slot] = key.layer, key.expert
        self.slot_LE[key.layer, key.expert] = slot
        self.state_S[slot], self.is_prefetched_S[slot] = SlotState.LOADING, False
        return before

    def forget(self, slot: int) -> None:
        """Frees a slot whose read failed."""
        key = self.occupant(slot)
        assert key is not None, f"slot {slot} holds no expert"
        self.slot_LE[key.layer, key.expert] = -1
        self._layer_S[slot] = self._expert_S[slot] = -1
        self.state_S[slot], self._pinned_S[slot] = SlotState.FREE, False

    def last_expected(self, visits_LE: Scores | None) -> tuple[int, float] | None:
        """Returns the slot to reuse and the number of visits until its expert is expected (infinity
        for a free slot); None if all are in use.

        Without `visits_LE`, the least recently used slot is returned.
        """
        is_open_S = ~self._pinned_S & (self.state_S != SlotState.LOADING)
        if not is_open_S.any():
            return None
        if visits_LE is None:
            until_S = -self._used_S.astype(np.float64)
        else:
            until_S = visits_LE[self._layer_S, self._expert_S]
        until_S = np.where(self.state_S == SlotState.FREE, np.inf, until_S)
        slot = int(np.where(is_open_S, until_S, -np.inf).argmax())
        return slot, float(until_S[slot])
