"""The header of a frame, which names its exchange.

It is read on arrival on a host, or after the step.

The host does not read a frame in a GPU's memory during the step: it would have to wait for the
device. There the header is copied aside, and all headers of a step are checked once its last rows
are back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_serve.errors import MoeServeError

MAGIC = 0x4D6F4557
HEADER_BYTES = 64
FLAG_ERROR = 1  # the sender failed, and the frame has no rows
_FIELDS = [
    ("magic", "<u4"),
    ("flags", "<u4"),
    ("epoch", "<u8"),
    ("step", "<u8"),
    ("layer", "<u4"),
    ("micro_batch", "<u4"),
    ("rows", "<u4"),
    ("zeros", f"V{HEADER_BYTES - 36}"),
]
_HEADER = np.dtype(_FIELDS)
_PACKED = struct.Struct("<IIQQIII")  # the same, on the host
_KEY = struct.Struct("<IIQQII")  # the same before the number of rows
KEY_BYTES = _KEY.size
LAYER_AT, MICRO_BATCH_AT = 24, 28  # of a key, two numbers of 32 bits


class WireError(MoeServeError):
    """A frame differs from the one that the step's plan announces."""


class Exchange(NamedTuple):
    """The step, layer and micro-batch that a frame belongs to."""

    epoch: int
    step: int
    layer: int
    micro_batch: int

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer}, micro-batch {self.micro_batch}"


def key_of(exchange: Exchange) -> bytes:
    """Returns the beginning of the header of an exchange's frames, up to the number of rows."""
    return _KEY.pack(MAGIC, 0, *exchange)


class Leg(NamedTuple):
    """One direction of an exchange, as reports name it."""

    name: Literal["dispatch", "combine"]
    exchange: Exchange

    def __str__(self) -> str:
        return f"{self.name} of {self.exchange}"


class Header(Protocol):
    """A frame's header, in the memory of the frame."""

    def write(self, exchange: Exchange, num_rows: int, flags: int) -> None: ...

    def check(self, exchange: Exchange, most: int, sender: str) -> int:
        """Checks the header -> the number of rows; raises WireError if the frame belongs to another
        exchange.
        """
        ...


class HostHeader:
    """Implements Header in host memory."""

    def __init__(self, buffer: Tensor) -> None:
        self._bytes: Any = buffer[:HEADER_BYTES].numpy()

    def write(self, exchange: Exchange, num_rows: int, flags: int) -> None:
        _PACKED.pack_into(self._bytes, 0, MAGIC, flags, *exchange, num_rows)

    def check(self, exchange: Exchange, most: int, sender: str) -> int:
        return _checked(_PACKED.unpack_from(self._bytes), exchange, most, sender)


class HeaderLog:
    """Headers of one step's frames, sent and received: two tables in the device's memory.

    Frames there have fixed sizes, so no rank needs to read a header to continue, and a header holds
    no number of rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: dict[Exchange, int] = {}
        self._to_send = self._received = torch.zeros(0, HEADER_BYTES, dtype=torch.uint8)
        self._awaited: list[tuple[Exchange, str]] = []  # with their senders

    def begin(self, exchanges: Sequence[Exchange], num_peers: int) -> None:
        """Begins a step with these exchanges, using one copy to the device."""
        self._places = {exchange: 2 * place for place, exchange in enumerate(exchanges)}
        headers = np.zeros(2 * len(exchanges), _HEADER)
        for exchange, place in self._places.items():
            headers[place] = _values(exchange, 0, 0)
            headers[place + FLAG_ERROR] = _values(exchange, 0, FLAG_ERROR)
        table = torch.from_numpy(headers.view(np.uint8).reshape(-1, HEADER_BYTES))
        self._to_send = table.to(self._device)
        size = (len(exchanges) * num_peers, HEADER_BYTES)
        self._received = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._awaited = []

    def header(self, buffer: Tensor) -> DeferredHeader:
        return DeferredHeader(self, buffer[:HEADER_BYTES])

    def write(self, section: Tensor, exchange: Exchange, flags: int) -> None:
        section.copy_(self._to_send[self._places[exchange] + flags])

    def note(self, section: Tensor, exchange: Exchange, sender: str) -> None:
        """Remembers a header that arrived."""
        self._received[len(self._awaited)].copy_(section)
        self._awaited.append((exchange, sender))

    def check(self) -> None:
        """Checks all headers received since `begin`; waits for the device. Raises WireError."""
        awaited, self._awaited = self._awaited, []
        if not awaited:
            return
        headers = self._received[: len(awaited)].cpu().numpy().view(_HEADER)[:, 0]
        for header, (exchange, sender) in zip(headers, awaited, strict=True):
            _checked(header.tolist()[:7], exchange, 0, sender)


class DeferredHeader:
    """Implements Header in a device's memory: `check` accepts every frame, and HeaderLog checks it
    later.
    """

    def __init__(self, log: HeaderLog, section: Tensor) -> None:
        self._log, self._section = log, section

    def write(self, exchange: Exchange, num_rows: int, flags: int) -> None:
        """Writes the header with the planned number of rows, whatever `num_rows` is."""
        self._log.write(self._section, exchange, flags)

    def check(self, exchange: Exchange, most: int, sender: str) -> int:
        self._log.note(self._section, exchange, sender)
        return most


def _values(exchange: Exchange, num_rows: int, flags: int) -> tuple[int | bytes, ...]:
    return (MAGIC, flags, *exchange, num_rows, b"")


def _checked(fields: Sequence[int], exchange: Exchange, most: int, sender: str) -> int:
    magic, flags, *found, rows = fields
    if magic != MAGIC:
        raise WireError(f"{exchange}: {sender} sent data that is not a frame (magic {magic:#x}).")
    if tuple(found) != exchange:
        raise WireError(
            f"{exchange} of epoch {exchange.epoch}: {sender} sent the frame of "
            f"{Exchange(*found)}, epoch {found[0]}."
        )
    if rows > most:
        raise WireError(f"{exchange}: {sender} sent {rows} rows, but at most {most} were planned.")
    if flags & FLAG_ERROR:
        raise WireError(f"{exchange}: {sender} failed; see its log.")
    return rows
