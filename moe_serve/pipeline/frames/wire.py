"""Lays out the frames that attention and expert ranks exchange: a header, then rows.

T rows are planned for the exchange, and n of them are sent. K: experts of a row; E: all experts;
D: width of the model.

    dispatch  [ header | foreseen [E] uint8 | ids [T, K] int32 | weights [T, K] fp32 |
                scales [T] fp32 | x [n, D] ]
    combine   [ header | row numbers [T] int32 | sums [n, D] fp64 or fp32 ]

Sections before the last have room for all planned rows, so both sides know every offset from the
step's plan; of the last section only the filled part is sent. Scales exist for fp8 rows only.
`foreseen` exists where some experts may be out of memory: it holds a predictor's estimate of which
experts the micro-batch's rows will need next, and zeros mean that there is none. A frame without
rows is a header.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_kernels.interface.rank_kernels import FrameShape
from moe_serve.pipeline.frames.frame_header import (
    FLAG_ERROR,
    HEADER_BYTES,
    KEY_BYTES,
    Exchange,
    Header,
)
from moe_serve.pipeline.frames.frame_memory import FrameMemory

_FP8_MAX = 448.0  # of float8_e4m3fn
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """Sizes of a model's frames.

    `rows`: how x is sent; `sums`: fp64, or fp32 if there is one expert rank.
    """

    width: int
    top_k: int
    dtype: torch.dtype  # dtype of the model
    row_dtype: torch.dtype
    sum_dtype: torch.dtype
    num_foreseen: int = 0  # experts with a prediction in each dispatch; 0: no predictions

    @property
    def head_bytes(self) -> int:
        """Bytes of a dispatch before its choices."""
        return HEADER_BYTES + _aligned(self.num_foreseen)

    @property
    def has_scales(self) -> bool:
        return self.row_dtype == torch.float8_e4m3fn

    def dispatch_bytes(self, num_rows: int) -> int:
        return DispatchFrame.offset_of_rows(self, num_rows) + num_rows * self.row_bytes

    def combine_bytes(self, num_rows: int) -> int:
        return CombineFrame.offset_of_sums(num_rows) + num_rows * self.sum_bytes

    def frame_shape(self, num_ranks: int, *, has_choices: bool) -> FrameShape | None:
        """Returns the frames as the kernels see them; None if rows are converted on the way or
        carry a prediction, which the kernels do not write. `has_choices`: see FrameShape."""
        if self.row_dtype != self.dtype or self.num_foreseen:
            return None
        return FrameShape(
            num_ranks=num_ranks,
            width=self.width,
            top_k=self.top_k,
            header_bytes=HEADER_BYTES,
            key_bytes=KEY_BYTES,
            has_choices=has_choices,
            has_wide_sums=self.sum_dtype == torch.float64,
        )

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
    num_foreseen: int = 0,
) -> WireFormat:
    """Makes the format of a model's frames.

    With one expert rank the sums are complete there: fp32 is exact.
    """
    named = {"auto": dtype, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    return WireFormat(
        width=width,
        top_k=top_k,
        dtype=dtype,
        row_dtype=named[wire_dtype],
        sum_dtype=torch.float32 if num_expert_ranks == 1 else torch.float64,
        num_foreseen=num_foreseen,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def fp8_scales(x_TD: Tensor) -> Tensor:
    """Returns one fp32 scale [T, 1] per row,
    which maps its largest value to that of float8_e4m3fn.
    """
    return (x_TD.float().abs().amax(dim=1, keepdim=True) / _FP8_MAX).clamp(min=1e-12)


def as_received(wire: WireFormat, x_TD: Tensor) -> Tensor:
    """Returns rows as the expert side sees them: rounded to the wire's dtype, then in the model's
    dtype.
    """
    if wire.has_scales:
        scales = fp8_scales(x_TD)
        return ((x_TD.float() / scales).to(wire.row_dtype).float() * scales).to(wire.dtype)
    return x_TD.to(wire.row_dtype).to(wire.dtype)


class FrameBytes:
    """The sizes of frames with room for a number of rows, each computed once."""

    def __init__(self, wire: WireFormat) -> None:
        self._wire = wire
        self._dispatch: dict[int, int] = {}
        self._combine: dict[int, int] = {}

    def dispatch(self, planned: int) -> int:
        """Returns the bytes of a frame with rows."""
        size = self._dispatch.get(planned)
        if size is None:
            size = self._dispatch[planned] = self._wire.dispatch_bytes(planned)
        return size

    def combine(self, planned: int) -> int:
        """Returns the bytes of a frame with sums."""
        size = self._combine.get(planned)
        if size is None:
            size = self._combine[planned] = self._wire.combine_bytes(planned)
        return size


class _Frame:
    """A header, followed by sections."""

    def __init__(self, memory: FrameMemory, header: Header) -> None:
        self._memory, self._header = memory, header

    @property
    def address(self) -> int:
        """The address of the frame, for a kernel that reads or fills it."""
        return self._memory.address

    def first(self, size: int) -> Tensor:
        """Returns the bytes to send: the first `size`, uint8."""
        return self._memory.first(size)

    def _section(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._memory.section(offset, rows, columns, dtype)


class DispatchFrame(_Frame):
    """Rows sent to an expert rank."""

    @staticmethod
    def offset_of_rows(wire: WireFormat, planned: int) -> int:
        size = 2 * _aligned(planned * wire.top_k * 4)
        if wire.has_scales:
            size += _aligned(planned * 4)
        return wire.head_bytes + size

    def write(
        self,
        wire: WireFormat,
        exchange: Exchange,
        planned: int,
        x_TD: Tensor,
        expert_ids_TK: Tensor | None,
        weights_TK: Tensor | None,
        foreseen_E: Tensor | None = None,
    ) -> Tensor:
        """Fills in n rows -> the bytes to send. Without weights, the expert side routes the rows,
        and ids are the numbers of their adapters, if there are any.
        """
        num_rows = x_TD.shape[0]
        self._header.write(exchange, num_rows, 0)
        end = self.offset_of_rows(wire, planned)
        if not num_rows:
            return self.first(HEADER_BYTES)
        if wire.num_foreseen:
            foreseen = self.foreseen(wire)
            foreseen.zero_() if foreseen_E is None else foreseen.copy_(foreseen_E)
        if expert_ids_TK is not None:
            ids, weights = self.choices(wire, planned, num_rows)
            ids.copy_(expert_ids_TK)
            if weights_TK is not None:
                weights.copy_(weights_TK)
        rows = self._section(end, num_rows, wire.width, wire.row_dtype)
        if wire.has_scales:
            scales = fp8_scales(x_TD)
            self._scales(wire, planned, num_rows).copy_(scales)
            x_TD = x_TD.float() / scales
        rows.copy_(x_TD)
        return self._memory.to_send(end + num_rows * wire.row_bytes)

    def write_nobody(
        self, wire: WireFormat, exchange: Exchange, planned: int, is_fixed: bool
    ) -> Tensor:
        """Fills in a frame without rows: only a header or, with fixed sizes, the planned rows with
        experts that no rank has.
        """
        self._header.write(exchange, 0, 0)
        if not is_fixed:
            return self.first(HEADER_BYTES)
        end = wire.dispatch_bytes(planned)
        self._memory.work[HEADER_BYTES:end].zero_()
        self.choices(wire, planned, planned)[0].fill_(-1)
        return self._memory.to_send(end)

    def open(self, wire: WireFormat, exchange: Exchange, planned: int, sender: str) -> int:
        """Checks a received frame -> its number of rows; raises WireError."""
        num_rows = self._header.check(exchange, planned, sender)
        self._memory.received(self.offset_of_rows(wire, planned) + num_rows * wire.row_bytes)
        return num_rows

    def foreseen(self, wire: WireFormat) -> Tensor:
        """Returns the prediction of experts that the sender's rows need in the next layer: uint8
        [E], in units of 1/255. The format must have one.
        """
        return self._section(HEADER_BYTES, 1, wire.num_foreseen, torch.uint8)[0]

    def choices(self, wire: WireFormat, planned: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Returns ids (int32, -1: on another rank) and weights (fp32), [n, K] each."""
        second = wire.head_bytes + _aligned(planned * wire.top_k * 4)
        return (
            self._section(wire.head_bytes, num_rows, wire.top_k, torch.int32),
            self._section(second, num_rows, wire.top_k, torch.float32),
        )

    def rows(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        """Returns x [n, D] in the model's dtype;
        a view of the frame if it was sent in that dtype.
        """
        x_TD = self._section(
            self.offset_of_rows(wire, planned), num_rows, wire.width, wire.row_dtype
        )
        if wire.has_scales:
            return (x_TD.float() * self._scales(wire, planned, num_rows)).to(wire.dtype)
        return x_TD.to(wire.dtype)

    def _scales(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        offset = wire.head_bytes + 2 * _aligned(planned * wire.top_k * 4)
        return self._section(offset, num_rows, 1, torch.float32)


class CombineFrame(_Frame):
    """Sums sent back to an attention rank."""

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
        """Fills in n sums, and the rows they belong to if the attention rank does not know them."""
        num_rows, start = sums_TD.shape[0], self.offset_of_sums(planned)
        self._header.write(exchange, num_rows, 0)
        if row_numbers_T is not None:
            self.row_numbers(num_rows).copy_(row_numbers_T)
        self._section(start, num_rows, wire.width, wire.sum_dtype).copy_(sums_TD)
        return self._memory.to_send(start + num_rows * wire.sum_bytes)

    def write_error(
        self, wire: WireFormat, exchange: Exchange, planned: int, is_fixed: bool
    ) -> Tensor:
        """Fills in an error in place of sums: this exchange failed here.

        Fixed-size frames carry sums of zero.
        """
        self._header.write(exchange, 0, FLAG_ERROR)
        if not is_fixed:
            self._memory.settle()
            return self.first(HEADER_BYTES)
        end = wire.combine_bytes(planned)
        self._memory.work[HEADER_BYTES:end].zero_()
        return self._memory.to_send(end)

    def open(self, wire: WireFormat, exchange: Exchange, planned: int, sender: str) -> int:
        """Checks a received frame -> its number of sums; raises WireError, also if the sender
        failed.
        """
        num_rows = self._header.check(exchange, planned, sender)
        self._memory.received(self.offset_of_sums(planned) + num_rows * wire.sum_bytes)
        return num_rows

    def sums(self, wire: WireFormat, planned: int, num_rows: int) -> Tensor:
        """Returns sums [n, D], a view of the frame."""
        return self._section(self.offset_of_sums(planned), num_rows, wire.width, wire.sum_dtype)

    def row_numbers(self, num_rows: int) -> Tensor:
        """Returns row numbers, int32 [n], ascending."""
        return self._section(HEADER_BYTES, num_rows, 1, torch.int32)[:, 0]
