"""Estimates the memory of each process of a server before any weight is read.

Weights are the model's shapes in the dtype in which they are held. The kernels' own packing, torch
itself and a step's activations come on top. So a plan that does not fit will not run, and a plan
that just fits may still fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of one process: the server or a rank. `kv_bytes` belong to `num_pages` KV pages."""

    name: str
    device: str
    weights: int
    kv_bytes: int = 0
    num_pages: int = 0
    buffers: int = 0  # for rows in transit between attention and experts
    adapters: int = 0  # those of the configuration, or as many as may be loaded

    @property
    def total(self) -> int:
        return self.weights + self.kv_bytes + self.buffers + self.adapters

    def __str__(self) -> str:
        parts = [f"weights {gib(self.weights)}"]
        if self.kv_bytes:
            parts.append(f"{self.num_pages} KV pages {gib(self.kv_bytes)}")
        if self.buffers:
            parts.append(f"dispatch buffers {gib(self.buffers)}")
        if self.adapters:
            parts.append(f"adapters {gib(self.adapters)}")
        return f"{self.name} on {self.device}: {', '.join(parts)}, in all {gib(self.total)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free bytes of one memory, and the processes that share it."""

    name: str
    free: int
    users: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All processes, and the memories of this machine that could be inspected."""

    processes: tuple[ProcessMemory, ...]
    rooms: tuple[Room, ...]

    def needed(self, room: Room) -> int:
        return sum(process.total for process in self.processes if process.name in room.users)

    def lines(self) -> list[str]:
        """Returns the lines for the log."""
        rooms = [
            f"{room.name}: {gib(self.needed(room))} of {gib(room.free)} free" for room in self.rooms
        ]
        return [str(process) for process in self.processes] + rooms

    def check(self) -> None:
        """Raises ConfigError if the processes cannot fit."""
        for room in self.rooms:
            if self.needed(room) > room.free:
                raise ConfigError(self._refusal(room))

    def _refusal(self, room: Room) -> str:
        users = [process for process in self.processes if process.name in room.users]
        weights, kv_bytes = sum(p.weights for p in users), sum(p.kv_bytes for p in users)
        buffers, adapters = sum(p.buffers for p in users), sum(p.adapters for p in users)
        with_adapters = f", adapters {gib(adapters)}" if adapters else ""
        pages = sum(p.num_pages for p in users)
        return (
            f"the model does not fit: weights take {gib(weights)}, {pages} KV pages "
            f"{gib(kv_bytes)}{with_adapters} and dispatch buffers {gib(buffers)}, "
            f"{gib(self.needed(room))} in all, and {room.name} has {gib(room.free)} free: "
            f"{_advice(users)}."
        )


def _advice(users: Sequence[ProcessMemory]) -> str:
    kv_bytes = sum(process.kv_bytes for process in users)
    if sum(process.adapters for process in users) > sum(process.weights for process in users):
        return "load fewer adapters (adapters.modules), or limit them (adapters.memory_bytes)"
    if kv_bytes > sum(process.weights for process in users):
        return "give the KV cache less (cache.num_pages, cache.memory_bytes, model.max_model_len)"
    return (
        "keep fewer experts in memory (model.expert_memory_bytes), give the KV cache less "
        "(cache.num_pages), or use ranks on more machines (moe-serve launch)"
    )


def gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"
