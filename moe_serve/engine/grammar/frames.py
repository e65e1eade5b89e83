"""Messages over a pipe: four bytes of length, and msgpack."""

from __future__ import annotations

import os
import select
import time

import msgspec

from moe_serve.engine.constraint import Constraint


class Words(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the worker, once: the vocabulary."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the worker: can this be compiled?"""

    constraint: Constraint


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker: the constraint as it is to be used, or why it cannot be, and which place in
    it is meant. After `Words` neither. `is_ended`: the worker gave no answer and was ended."""

    constraint: Constraint | None = None
    why: str | None = None
    place: str = ""
    is_ended: bool = False


def send(descriptor: int, message: Words | Compile | Verdict) -> None:
    """Blocks until all of it is in the pipe."""
    content = msgspec.msgpack.encode(message)
    rest = memoryview(len(content).to_bytes(4, "big") + content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int, timeout_s: float | None = None) -> bytes | None:
    """The next message's content; None: the other side has ended. Raises TimeoutError."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    head = _read(descriptor, 4, deadline)
    return None if head is None else _read(descriptor, int.from_bytes(head, "big"), deadline)


def _read(descriptor: int, count: int, deadline: float | None) -> bytes | None:
    content = b""
    while len(content) < count:
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
        piece = os.read(descriptor, count - len(content))
        if not piece:
            return None
        content += piece
    return content
