"""Messages over a pipe: four bytes of length, and msgpack."""

from __future__ import annotations

import msgspec

from moe_serve.child_python import receive_frame, send_frame
from moe_serve.engine.request.constraint import Constraint


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
    send_frame(descriptor, msgspec.msgpack.encode(message))


def receive(descriptor: int, timeout_s: float | None = None) -> bytes | None:
    """The next message's content; None: the other side has ended. Raises TimeoutError."""
    return receive_frame(descriptor, timeout_s)
