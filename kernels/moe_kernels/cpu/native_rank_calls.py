"""The native kernels' calls of ranks: `cpu/source/calls/turn.cpp` and `service.cpp`.

T rows of a micro-batch, K choices per row, D model width, R expert ranks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address
from moe_kernels.cpu.native_experts import ExpertTable
from moe_kernels.cpu.native_front import NativeFront
from moe_kernels.cpu.native_linear import NativeRouterLinear
from moe_kernels.cpu.native_rank_steps import NativeLane, NativeServiceStep, NativeTurnStep
from moe_kernels.interface.rank_kernels import (
    TURN_CLOCKS,
    CopyTable,
    FrameShape,
    ServiceParts,
    TurnLayer,
    WrongFrameError,
)
from moe_kernels.interface.routing import RouterShape

_MAX_KEY_BYTES = 64
_Key = ctypes.c_uint8 * _MAX_KEY_BYTES


@functools.cache  # making such a type takes longer than a call
def _pointers(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count


@functools.cache
def _numbers(count: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * count


class _FrameShapeStruct(ctypes.Structure):
    """`FrameShape` in cpu/source/calls/frames.h."""

    _fields_ = tuple((name, Int) for name in (
        "num_ranks", "width", "top_k", "header_bytes", "key_bytes", "has_choices", "has_wide_sums",
    ))  # fmt: skip


class _CopiesStruct(ctypes.Structure):
    """`Copies` in cpu/source/calls/frames.h."""

    _fields_ = (*((name, Pointer) for name in ("ranks", "counts", "first")), ("most", Int))


class _TurnStruct(ctypes.Structure):
    """`Turn` in cpu/source/calls/turn.cpp."""

    _fields_ = (
        *((name, Pointer) for name in (
            "shape", "sums", "shared", "front", "plan", "pages", "copies", "rows", "positions",
            "kv_rows", "hidden", "out", "x", "ids", "weights", "numbers", "counts", "sizes",
            "times",
        )),
        *((name, Int) for name in ("num_rows", "threads", "is_taking")),
        ("sums_key", _Key),
        ("rows_key", _Key),
    )  # fmt: skip


class _ServiceStruct(ctypes.Structure):
    """`Service` in cpu/source/calls/service.cpp."""

    _fields_ = (
        *((name, Pointer) for name in (
            "shape", "rows", "sums", "planned", "counts", "sizes", "router", "route",
            "selection_bias", "copies",
        )),
        *((name, Int) for name in ("num_senders", "num_experts", "rank")),
        ("key", _Key),
    )  # fmt: skip


class NativeRankCalls:
    """Implements RankCalls. `router` returns the struct of a router's shape."""

    def __init__(
        self, native: NativeLibrary, router: Callable[[RouterShape], ctypes.Structure]
    ) -> None:
        self._native, self._router = native, router
        self._shapes: dict[FrameShape, _FrameShapeStruct] = {}

    def copies(self, copies: CopyTable) -> NativeCopies:
        return NativeCopies(copies)

    def lane(self, socket: int, timeout_s: float) -> NativeLane:
        return NativeLane(socket, timeout_s)

    def turn_step(self, layers: Sequence[tuple[int, TurnLayer, int, Any | None]]) -> NativeTurnStep:
        return NativeTurnStep(self._native, layers)

    def service_step(self) -> NativeServiceStep:
        return NativeServiceStep(self._native)

    def turn(
        self,
        shape: FrameShape,
        hidden_TD: Tensor,
        positions_T: Tensor,
        kv_rows: Tensor,
        *,
        keeps_choices: bool,
    ) -> NativeTurn:
        struct = self._shape(shape)
        return NativeTurn(self._native, struct, hidden_TD, positions_T, kv_rows, keeps_choices)

    def service(self, shape: FrameShape, parts: ServiceParts) -> NativeService:
        route = None if parts.router_shape is None else self._router(parts.router_shape)
        return NativeService(self._native, self._shape(shape), parts, route)

    def _shape(self, shape: FrameShape) -> _FrameShapeStruct:
        struct = self._shapes.get(shape)
        if struct is None:
            assert shape.key_bytes <= _MAX_KEY_BYTES, f"a key of {shape.key_bytes} bytes"
            struct = self._shapes[shape] = _FrameShapeStruct(
                *(int(getattr(shape, field[0])) for field in _FrameShapeStruct._fields_)
            )
        return struct


class NativeCopies:
    """The table of a layer's experts, with the tensors that it points to."""

    __slots__ = ("_copies", "_struct", "pointer")

    def __init__(self, copies: CopyTable) -> None:
        tensors = copies.ranks_EM, copies.counts_E, copies.first_E
        assert all(each.is_contiguous() and each.dtype == torch.int64 for each in tensors), "tables"
        pointers = (each.data_ptr() for each in tensors)
        self._struct = _CopiesStruct(*pointers, copies.ranks_EM.shape[1])
        self._copies, self.pointer = copies, ctypes.addressof(self._struct)


class NativeTurn:
    """Implements AttentionTurn."""

    def __init__(
        self,
        native: NativeLibrary,
        shape: _FrameShapeStruct,
        hidden_TD: Tensor,
        positions_T: Tensor,
        kv_rows: Tensor,
        keeps_choices: bool,
    ) -> None:
        num_rows, num_ranks = len(hidden_TD), shape.num_ranks
        assert hidden_TD.is_contiguous() and hidden_TD.dtype == native.dtype, "rows in one piece"
        self.num_rows = num_rows
        self._function, self._keeps_choices = native.function("moe_turn"), keeps_choices
        self._inputs, self._shape = (positions_T, kv_rows), shape
        self.hidden_TD, self.x_TD = hidden_TD, torch.empty_like(hidden_TD)
        self._out_TD = torch.empty_like(hidden_TD)
        self._times = _numbers(TURN_CLOCKS)()
        pointers, numbers = _pointers(num_ranks), _numbers(num_ranks)
        self._addresses = pointers(), pointers()
        self._numbers = torch.empty(num_ranks * num_rows, dtype=torch.int64)
        self._counts, self._sizes = numbers(), numbers()
        sums, rows = self._addresses
        self._struct = _TurnStruct(
            shape=ctypes.addressof(shape),
            sums=ctypes.addressof(sums),
            rows=ctypes.addressof(rows),
            positions=positions_T.data_ptr(),
            kv_rows=kv_rows.data_ptr(),
            out=self._out_TD.data_ptr(),
            x=self.x_TD.data_ptr(),
            numbers=self._numbers.data_ptr(),
            counts=ctypes.addressof(self._counts),
            sizes=ctypes.addressof(self._sizes),
            times=ctypes.addressof(self._times),
            num_rows=num_rows,
            threads=native.threads,
        )
        self.pointer = ctypes.addressof(self._struct)
        self._make_choices()

    @property
    def times(self) -> tuple[int, ...]:
        return tuple(self._times)

    @property
    def counts(self) -> list[int]:
        return self._counts[:]

    def add(self, sums: list[int | None], shared_TD: Tensor | None) -> None:
        self._take(sums, shared_TD)
        self._struct.front = None
        self._call()

    def run(
        self,
        layer: TurnLayer,
        key: bytes,
        rows: list[int],
        sums: list[int | None] | None,
        shared_TD: Tensor | None,
    ) -> list[int]:
        front, struct = layer.front, self._struct
        assert isinstance(front, NativeFront), "a native front"
        self._take(sums, shared_TD)
        if self._keeps_choices:
            self._make_choices()
        struct.front, struct.plan = front.pointer, layer.plan.pointer
        struct.pages = ctypes.addressof(front.pages_struct(layer.pages))
        struct.copies = None if layer.copies is None else layer.copies.pointer
        self._addresses[1][:] = [*rows]
        struct.rows_key[: len(key)] = key
        self._call()
        sizes: list[int] = self._sizes[:]
        return sizes

    def give_shared(self, shared_TD: Tensor | None) -> None:
        """Sets the output of the shared expert, for a call of several layers."""
        assert self.hidden_TD is self._out_TD, "the rows are with the experts"
        self._struct.shared = address(shared_TD)

    def _take(self, sums: list[int | None] | None, shared_TD: Tensor | None) -> None:
        struct = self._struct
        struct.hidden, struct.shared = self.hidden_TD.data_ptr(), address(shared_TD)
        struct.is_taking = sums is not None
        if sums is not None:
            self._addresses[0][:] = [*sums]
        else:
            assert self.hidden_TD is not self._out_TD, "the rows are with the experts"

    def _call(self) -> None:
        wrong: int = self._function(self.pointer)
        if wrong:
            raise WrongFrameError(wrong - 1)
        self.hidden_TD = self._out_TD

    def _make_choices(self) -> None:
        num_rows, top_k = self.num_rows, self._shape.top_k
        self.expert_ids_TK = torch.empty(num_rows, top_k, dtype=torch.int64)
        self.weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32)
        self._struct.ids = self.expert_ids_TK.data_ptr()
        self._struct.weights = self.weights_TK.data_ptr()


class NativeService:
    """Implements ExpertService."""

    def __init__(
        self,
        native: NativeLibrary,
        shape: _FrameShapeStruct,
        parts: ServiceParts,
        route: ctypes.Structure | None,
    ) -> None:
        router = parts.router
        assert router is None or isinstance(router, NativeRouterLinear), "a native router"
        self._function, self._parts, self._route = native.function("moe_service"), parts, route
        self._shape, self._num_senders = shape, 0
        self._struct = _ServiceStruct(
            shape=ctypes.addressof(shape),
            router=None if router is None else router.pointer,
            route=None if route is None else ctypes.addressof(route),
            selection_bias=address(parts.selection_bias_E),
            copies=None if parts.copies is None else parts.copies.pointer,
            num_experts=parts.num_experts,
            rank=parts.rank,
        )
        self.pointer = ctypes.addressof(self._struct)

    def __call__(
        self, bank: Any, key: bytes, rows: list[int], sums: list[int], planned: list[int]
    ) -> list[int] | None:
        assert isinstance(bank, ExpertTable), f"native experts, not {type(bank).__name__}"
        if len(rows) != self._num_senders:
            self._make_room(len(rows))
        self._rows[:], self._sums[:] = [*rows], [*sums]
        self._planned[:] = [*planned]
        self._struct.key[: len(key)] = key
        if self._function(self.pointer, bank.pointer):
            return None
        return self._sizes[:]

    def _make_room(self, num_senders: int) -> None:
        struct, self._num_senders = self._struct, num_senders
        pointers, numbers = _pointers(num_senders), _numbers(num_senders)
        self._rows, self._sums, self._planned = pointers(), pointers(), numbers()
        self._counts, self._sizes = numbers(), numbers()
        struct.rows, struct.sums = ctypes.addressof(self._rows), ctypes.addressof(self._sums)
        struct.planned = ctypes.addressof(self._planned)
        struct.counts, struct.sizes = ctypes.addressof(self._counts), ctypes.addressof(self._sizes)
        struct.num_senders = num_senders
