"""Threads that read experts in addition to the thread that runs stages."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

from experts.memory.slot_table import ExpertKey

_IDLE_S = 0.5  # seconds between two checks that the memory still exists


class Readable(Protocol):
    """The methods of the memory that the threads call."""

    def look_ahead(self) -> None: ...

    def next_read(self) -> ExpertKey | None: ...

    def fetch(self, key: ExpertKey) -> None: ...


class ReaderThreads:
    """Starts and ends the reader threads. They hold no reference to the memory while idle, and end
    when it is gone or the interpreter exits."""

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
                del memory  # lets the memory be freed while the thread is idle
                changed.wait(_IDLE_S)
                continue
        memory.fetch(key)
