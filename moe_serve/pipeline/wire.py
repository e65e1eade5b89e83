"""What travels between an attention and an expert rank: a header and the rows, in one buffer.

T rows planned for the exchange, n of them sent, K choices, D model width.

    dispatch  [ header | ids [T, K] int32 | weights [T, K] fp32 | scales [T] fp32 | x [n, D] ]
    combine   [ header | row numbers [T] int32 | sums [n, D] fp64 or fp32 ]

Sections before the last have room for all planned rows, so both sides know every offset from the
step's plan; the last is sent as far as it is filled. Scales are there for fp8 rows only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_serve.errors import MoeServeError

MAGIC = 0x4D6F4557
HEADER_BYTES = 64
FLAG_ERROR = 1  # the sender failed: there are no rows
_HEADER = struct.Struct("<IIQQIII")  # magic, flags, epoch, step, layer, micro-batch, rows
_MAX_SECTIONS = 256  # that a frame remembers
_FP8_MAX = 448.0  # of float8_e4m3fn
_ALIGNMENT = 64


class WireError(MoeServeError):
    """A frame is not the one that the step's plan announces."""


class Exchange(NamedTuple):
    """Which exchange of which step a frame belongs to."""

    epoch: int
    step: int
    layer: int
    micro_batch: int

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Leg:
    """One way of an exchange, as reports name it."""

    name: Literal["dispatch", "combine"]
    exchange: Exchange

    def __str__(self) -> str:
        return f"{self.name} of {self.exchange}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """Sizes of a model's frames. `rows`: how x travels; `sums`: fp64, or fp32 if E is 1."""

    width: int
    top_k: int
    dtype: torch.dtype  # the model's
    row_dtype: torch.dtype
    sum_dtype: torch.dtype

    @property
    def has_scales(self) -> bool:
        return self.row_dtype == torch.float8_e4m3fn

    def dispatch_bytes(self, num_rows: int) -> int:
        return DispatchFrame.offset_of_rows(self, num_rows) + num_rows * self.row_bytes

    def combine_bytes(self, num_rows: int) -> int:
        return CombineFrame.offset_of_sums(num_rows) + num_rows * self.sum_bytes

    @property
    def row_bytes(self) -> int:
        return self.width * self.row_dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        return self.width * self.sum_dtype.itemsize


def make_wire_format(
    width: int,
    top_k: int,
    dtype: torch.dtype,
    num_expert_ranks: int,
    wire_dtype: Literal["auto", "bf16", "fp8"] = "auto",
) -> WireFormat:
    """The frames of a model. With one expert rank the sums are complete there: fp32 is exact."""
    named = {"auto": dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    return WireFormat(
        width=width,
        top_k=top_k,
        dtype=dtype,
        row_dtype=named[wire_dtype],
        sum_dtype=torch.float32 if num_expert_ranks == 1 else torch.float64,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class _Frame:
    """A buffer with a header."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer  # uint8
        self._memory: Any = buffer.numpy()
        self._sections: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        self._beginnings: dict[int, Tensor] = {}

    def _write_header(self, exchange: Exchange, num_rows: int, flags: int) -> None:
        _HEADER.pack_into(self._memory, 0, MAGIC, flags, *exchange, num_rows)

    def check(self, exchange: Exchange, most: int, sender: str) -> int:
        """-> the number of rows; raises WireError if this is another exchange's frame."""
        magic, flags, *found, rows = _HEADER.unpack_from(self._memory)
        if magic != MAGIC:
            raise WireError(f"{exchange}: {sender} sent no frame (magic {magic:#x}).")
        if tuple(found) != exchange:
            raise WireError(
                f"{exchange} of epoch {exchange.epoch}: {sender} sent the frame of "
                f"{Exchange(*found)}, epoch {found[0]}."
            )
        if rows > most:
            raise WireError(f"{exchange}: {sender} sent {rows} rows, at most {most} were planned.")
        if flags & FLAG_ERROR:
            raise WireError(f"{exchange}: {sender} failed, see its log.")
        return int(rows)

    def _section(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A view of the buffer. Steps repeat each other's sizes, so views are kept."""
        key = (offset, rows, columns, dtype)
        section = self._sections.get(key)
        if section is None:
            if len(self._sections) >= _MAX_SECTIONS:
                self._sections.clear()
            size = rows * columns * dtype.itemsize
            section = self.buffer[offset : offset + size].view(dtype).view(rows, columns)
            self._sections[key] = section
        return section

    def _upto(self, end: int) -> Tensor:
        """The buffer's beginning: what is sent."""
        beginning = self._beginnings.get(end)
        if beginning is None:
            if len(self._beginnings) >= _MAX_SECTIONS:
                self._beginnings.clear()
            beginning = self._beginnings[end] = self.buffer[:end]
        return beginning


class DispatchFrame(_Frame):
    """Rows on their way to an expert rank."""

    @staticmethod
    def offset_of_rows(wire: WireFormat, planned: int) -> int:
        size = 2 * _aligned(planned * wire.top_k * 4)
        if wire.has_scales:
            size += _aligned(planned * 4)
        return HEADER_BYTES + size

    def write(
        self,
        wire: WireFormat,
        exchange: Exchange,
        planned: int,
        x_TD: Tensor,
        expert_ids_TK: Tensor | None,
        weights_TK: Tensor | None,
    ) -> Tensor:
        """Fill in n rows -> what to send. Without ids: the expert side routes them."""
        num_rows = x_TD.shape[0]
        self._write_header(exchange, num_rows, 0)
        end = self.offset_of_rows(wire, planned)
        if not num_rows:
            return self._upto(HEADER_BYTES)
        if expert_ids_TK is not None and weights_TK is not None:
            ids, weights = self.choices(wire, planned, num_rows)
            ids.copy_(expert_ids_TK)
            weights.copy_(weights_TK)
        rows = self._section(end, num_rows, wire.width, wire.row_dtype)
        if wire.has_scales:
            scales = (x_TD.float().abs().amax(dim=1, keepdim=True) / _FP8_MAX).clamp(min=1e-12)
            self._scales(wire, planned, num_rows).copy_(scales)
            x_TD = x_TD.float() / scales
        rows.copy_(x_TD)
        return self._upto(end + num_rows * wire.row_bytes)

    def choices(self, wire: WireFormat, planned: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Ids (int32, -1: elsewhere) and weights (fp32), [n, K] each."""
        second = HEADER_BYTES + _aligned(planned * wire.top_k * 4)
        return (
            self._section(HEADER_BYTES, num_rows, wire.top_k, torch.int32),
            self._section(second, num_rows, wire.top_k, torch.float32),
        )

    def rows(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        """x [n, D] in the model's dtype: a view of the buffer where it travels so."""
        x_TD = self._section(
            self.offset_of_rows(wire, planned), num_rows, wire.width, wire.row_dtype
        )
        if wire.has_scales:
            return (x_TD.float() * self._scales(wire, planned, num_rows)).to(wire.dtype)
        return x_TD.to(wire.dtype)

    def _scales(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        offset = HEADER_BYTES + 2 * _aligned(planned * wire.top_k * 4)
        return self._section(offset, num_rows, 1, torch.float32)


class CombineFrame(_Frame):
    """Sums on their way back."""

    @staticmethod
    def offset_of_sums(planned: int) -> int:
        return HEADER_BYTES + _aligned(planned * 4)

    def write(
        self,
        wire: WireFormat,
        exchange: Exchange,
        planned: int,
        sums_TD: Tensor,
        row_numbers_T: Tensor | None = None,
    ) -> Tensor:
        """Fill in n sums, and which rows they belong to if the sender does not know."""
        num_rows, start = sums_TD.shape[0], self.offset_of_sums(planned)
        self._write_header(exchange, num_rows, 0)
        if row_numbers_T is not None:
            self.row_numbers(num_rows).copy_(row_numbers_T)
        self._section(start, num_rows, wire.width, wire.sum_dtype).copy_(sums_TD)
        return self._upto(start + num_rows * wire.sum_bytes)

    def write_error(self, exchange: Exchange) -> Tensor:
        """In place of sums: this exchange failed here."""
        self._write_header(exchange, 0, FLAG_ERROR)
        return self._upto(HEADER_BYTES)

    def sums(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        """[n, D], a view of the buffer."""
        return self._section(self.offset_of_sums(planned), num_rows, wire.width, wire.sum_dtype)

    def row_numbers(self, num_rows: int) -> Tensor:
        """int32 [n], ascending."""
        return self._section(HEADER_BYTES, num_rows, 1, torch.int32)[:, 0]
