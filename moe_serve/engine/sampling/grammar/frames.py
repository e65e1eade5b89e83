"""The messages to and from a grammar worker over a pipe: four bytes of length, then msgpack."""

from __future__ import annotations

import msgspec

from moe_serve.child_python import receive_frame, send_frame
from moe_serve.engine.request.constraint import Constraint


class Words(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The vocabulary, sent to the worker once."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A constraint, sent to the worker to check whether it can be compiled."""

    constraint: Constraint


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker's answer: the constraint to use, or why it cannot be used and the place in it.

    Both are empty in the answer to `Words`. `is_ended` means that the worker gave no answer and was
    ended.
    """

    constraint: Constraint | None = None
    why: str | None = None
    place: str = ""
    is_ended: bool = False


def send(descriptor: int, message: Words | Compile | Verdict) -> None:
    """Sends a message. Blocks until all of it is in the pipe."""
    send_frame(descriptor, msgspec.msgpack.encode(message))


def receive(descriptor: int, timeout_s: float | None = None) -> bytes | None:
    """Returns the next message's content; None if the other side has ended. Raises TimeoutError."""
    return receive_frame(descriptor, timeout_s)
