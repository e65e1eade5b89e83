"""Experts read into free slots beside a rank's steps, so many bytes a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from experts.slot_room import SlotRoom
from moe_kernels.kernels import ExpertWeights
from moe_serve.cluster.messages import Staged
from moe_serve.errors import ChannelClosedError

_log = logging.getLogger(__name__)

ReadExpert = Callable[[int, int], ExpertWeights]  # (layer, expert); raises if it cannot be read


class ExpertCopies:
    """At most one order at a time. A slice is one expert: after it the thread sleeps, so that the
    rate is kept. `tell` is called on that thread, as its last act."""

    def __init__(
        self, name: str, room: SlotRoom, read: ReadExpert, tell: Callable[[Staged], None]
    ) -> None:
        self._name, self._room, self._read, self._tell = name, room, read, tell
        self._thread: threading.Thread | None = None
        self._is_cancelled = threading.Event()

    def start(
        self, placement: int, gained: Mapping[int, Sequence[int]], bytes_per_s: float
    ) -> None:
        self.cancel()
        self._is_cancelled = threading.Event()
        arguments = (placement, gained, bytes_per_s, self._is_cancelled)
        name = f"{self._name} copies"
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """All has been told; what was read stays where it is."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def cancel(self) -> None:
        """What was read is not needed. Waits for the expert that is being read."""
        self._is_cancelled.set()
        self.end()
        self._room.drop_staged()

    def _run(
        self,
        placement: int,
        gained: Mapping[int, Sequence[int]],
        bytes_per_s: float,
        is_cancelled: threading.Event,
    ) -> None:
        num_bytes, why = 0, None
        pause_s = self._room.slot_bytes / bytes_per_s
        try:
            for layer, expert in [(layer, e) for layer, ids in gained.items() for e in ids]:
                if is_cancelled.is_set():
                    return
                self._copy(layer, expert)
                num_bytes += self._room.slot_bytes
                is_cancelled.wait(pause_s)
        except Exception as error:  # top of the thread: whatever it is, the move is called off
            _log.exception("copies for placement %d", placement)
            why = str(error)
        with suppress(ChannelClosedError):
            self._tell(Staged(placement=placement, num_bytes=num_bytes, why=why))

    @torch.inference_mode()
    def _copy(self, layer: int, expert: int) -> None:
        self._room.stage(layer, expert, self._read(layer, expert))
