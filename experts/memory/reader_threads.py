"""The threads that read experts beside the one that runs stages."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from experts.memory.slot_table import ExpertKey

_IDLE_S = 0.5  # between two looks whether the memory is still there


class Readable(Protocol):
    """What the threads ask of their memory."""

    def look_ahead(self) -> None: ...

    def next_read(self) -> ExpertKey | None: ...

    def fetch(self, key: ExpertKey) -> None: ...


class ReaderThreads:
    """They end with their memory, which they do not keep alive, and before the interpreter does."""

    def __init__(self, memory: Readable, count: int) -> None:
        self.changed = threading.Condition()
        self._ended = threading.Event()
        self._memory = weakref.ref(memory)
        arguments = (self._memory, self.changed, self._ended)
        self._threads = [
            threading.Thread(target=_read, args=arguments, daemon=True, name="expert-memory")
            for _ in range(count)
        ]
        self._finalizer = weakref.finalize(memory, _end, self._threads, self.changed, self._ended)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._finalizer()


def _end(
    threads: list[threading.Thread], changed: threading.Condition, ended: threading.Event
) -> None:
    ended.set()
    with changed:
        changed.notify_all()
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join()


@torch.inference_mode()
def _read(of: weakref.ref[Readable], changed: threading.Condition, ended: threading.Event) -> None:
    while not ended.is_set():
        memory = of()
        if memory is None:
            return
        memory.look_ahead()
        with changed:
            key = memory.next_read()
            if key is None:
                del memory  # it may go while nobody needs it
                changed.wait(_IDLE_S)
                continue
        memory.fetch(key)
