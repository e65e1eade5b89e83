"""Reads experts into free slots beside a rank's steps, at a limited number of bytes a second."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from experts.slot_room import SlotRoom
from moe_kernels.interface.kernels import ExpertWeights
from moe_serve.cluster.control.placement_messages import Staged
from moe_serve.errors import ChannelClosedError

_log = logging.getLogger(__name__)

ReadExpert = Callable[[int, int], ExpertWeights]  # (layer, expert); raises if it cannot be read


EARLIER_S = 10.0  # time that an order waits for the last read of the one before
_CLOSE_S = 2.0  # time that the rank's end waits for a read


class ExpertCopies:
    """Carries out at most one order at a time, on a thread of its own.

    After each expert the thread sleeps to keep the rate. It calls `tell` as its last act, unless
    the order was cancelled. A read may hang, for example on a network file system that is gone. The
    rank keeps serving. The result of such a read is dropped, and until it ends later orders fail
    and say why.
    """

    def __init__(
        self, name: str, room: SlotRoom, read: ReadExpert, tell: Callable[[Staged], None]
    ) -> None:
        self._name, self._room, self._read, self._tell = name, room, read, tell
        self._thread: threading.Thread | None = None
        self._is_cancelled = threading.Event()
        self._reading = threading.Lock()  # held by the thread that reads: at most one hangs

    def start(
        self, placement: int, gained: Mapping[int, Sequence[int]], bytes_per_s: float
    ) -> None:
        self.cancel()
        self._is_cancelled = threading.Event()
        arguments = (placement, gained, bytes_per_s, self._is_cancelled)
        name = f"{self._name} copies"
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Drops the experts read so far, and the one being read."""
        self._is_cancelled.set()
        self._room.drop_staged()

    def close(self) -> None:
        """Ends the copies with the rank; a read that hangs does not hold it up."""
        self.cancel()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._reading.locked():
                _log.warning("%s: reading an expert hangs; its thread is abandoned", self._name)

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
            with self._alone():
                for layer, expert in [(layer, e) for layer, ids in gained.items() for e in ids]:
                    if is_cancelled.is_set():
                        return
                    self._copy(layer, expert, is_cancelled)
                    num_bytes += self._room.slot_bytes
                    is_cancelled.wait(pause_s)
        except Exception as error:  # top of the thread: any error ends the move
            _log.exception("copying experts for placement %d failed", placement)
            why = str(error)
        if is_cancelled.is_set():
            return
        with suppress(ChannelClosedError):
            self._tell(Staged(placement=placement, num_bytes=num_bytes, why=why))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits for an earlier order's last read; raises TimeoutError if it does not end."""
        if not self._reading.acquire(timeout=EARLIER_S):
            raise TimeoutError("the read of an expert for an earlier move has not ended")
        try:
            yield
        finally:
            self._reading.release()

    @torch.inference_mode()
    def _copy(self, layer: int, expert: int, is_cancelled: threading.Event) -> None:
        self._room.stage(layer, expert, self._read(layer, expert), is_cancelled.is_set)
