"""The native kernels' calls of ranks for several exchanges: `moe_turn_step`, `moe_service_step`.

M micro-batches, A attention ranks, T rows of a micro-batch, D model width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address
from moe_kernels.cpu.native_experts import ExpertTable
from moe_kernels.cpu.native_front import NativeFront
from moe_kernels.interface.rank_kernels import ExpertsOfLayer, StepKey, TurnLayer
from moe_kernels.interface.rank_lanes import (
    INLINE,
    SHORT_BYTES,
    SLOTS,
    LaneMessage,
    LaneRest,
    LaneStatus,
    StepEnd,
)

_MAX_MESSAGES = 64


class _MessageStruct(ctypes.Structure):
    """`LaneMessage` in cpu/source/calls/lanes.h."""

    _fields_ = (
        ("tag", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
        ("size", Int),
        ("sent", ctypes.c_double),
        ("content", ctypes.c_char * SHORT_BYTES),
    )


class _LaneStruct(ctypes.Structure):
    """`Lane` in cpu/source/calls/lanes.h."""

    _fields_ = (
        ("socket", Int),
        ("timeout_ns", Int),
        ("out", Pointer * SLOTS),
        ("out_bytes", Int * SLOTS),
        ("into", Pointer * SLOTS),
        *((name, Int) for name in ("num_messages", "num_unread", "num_descriptors", "error")),
        ("waited_ns", Int),
        ("messages", _MessageStruct * _MAX_MESSAGES),
        ("descriptors", ctypes.c_int32 * _MAX_MESSAGES),
        ("unread", ctypes.c_uint8 * 4096),
    )


class _KeyStruct(ctypes.Structure):
    """`StepKey` in cpu/source/calls/frames.h."""

    _fields_ = (("layer_at", Int), ("batch_at", Int), ("first", ctypes.c_uint8 * 64))


class _TurnLayerStruct(ctypes.Structure):
    """`TurnLayer` in cpu/source/calls/turn.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("front", "pages", "copies", "shared")),
        *((name, Int) for name in ("number", "shape")),
    )


class _TurnStepStruct(ctypes.Structure):
    """`TurnStep` in cpu/source/calls/turn.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("lanes", "turns", "layers", "plans", "shared")),
        *((name, Int) for name in (
            "num_layers", "num_batches", "num_shapes", "before", "done", "rank",
        )),
        ("key", _KeyStruct),
    )  # fmt: skip


class _ServiceLayerStruct(ctypes.Structure):
    """`ServiceLayer` in cpu/source/calls/service.cpp."""

    _fields_ = (("service", Pointer), ("bank", Pointer), ("number", Int))


class _ServiceStepStruct(ctypes.Structure):
    """`ServiceStep` in cpu/source/calls/service.cpp."""

    _fields_ = (
        *((name, Pointer) for name in ("lanes", "rows", "layers")),
        *((name, Int) for name in ("num_lanes", "num_layers", "num_batches", "done", "rank")),
        ("key", _KeyStruct),
    )


class NativeLane:
    """Implements Lane."""

    def __init__(self, socket: int, timeout_s: float) -> None:
        self.struct = _LaneStruct(socket=socket, timeout_ns=int(timeout_s * 1e9))
        self.pointer = ctypes.addressof(self.struct)

    def map_out(self, slot: int, address: int, size: int) -> None:
        self.struct.out[slot], self.struct.out_bytes[slot] = address, size

    def map_in(self, slot: int, address: int) -> None:
        self.struct.into[slot] = address

    def load(self, messages: Sequence[LaneMessage]) -> bool:
        struct = self.struct
        if struct.num_messages + len(messages) > _MAX_MESSAGES // 2:
            return False
        for message in messages:
            entry = struct.messages[struct.num_messages]
            entry.tag, entry.slot, entry.size = message.tag, message.slot, message.size
            entry.sent = message.sent
            ctypes.memmove(_content(entry), message.content, len(message.content))
            struct.num_messages += 1
        return True

    def take(self) -> LaneRest:
        struct = self.struct
        waited_s, struct.waited_ns = struct.waited_ns / 1e9, 0
        if not (struct.num_messages or struct.num_unread or struct.num_descriptors):
            return LaneRest((), b"", (), waited_s)
        rest = LaneRest(
            [_message(entry) for entry in struct.messages[: struct.num_messages]],
            bytes(struct.unread[: struct.num_unread]),
            struct.descriptors[: struct.num_descriptors],
            waited_s,
        )
        struct.num_messages = struct.num_unread = struct.num_descriptors = 0
        return rest


def _content(entry: _MessageStruct) -> int:
    return ctypes.addressof(entry) + _MessageStruct.content.offset


def _message(entry: _MessageStruct) -> LaneMessage:
    size = entry.size if entry.slot & INLINE else 0
    content = ctypes.string_at(_content(entry), size)
    return LaneMessage(entry.tag, entry.slot, entry.size, entry.sent, content)


class NativeTurnStep:
    """Implements TurnStep."""

    def __init__(
        self, native: NativeLibrary, layers: Sequence[tuple[int, TurnLayer, int, Any | None]]
    ) -> None:
        self._function, self._layers = native.function("moe_turn_step"), layers
        self._structs = (_TurnLayerStruct * len(layers))()
        self._size = ctypes.sizeof(_TurnLayerStruct)
        for struct, (number, layer, shape, shared) in zip(self._structs, layers, strict=True):
            assert isinstance(layer.front, NativeFront), "a native front"
            assert shared is None or isinstance(shared, ExpertTable), "a native MLP"
            struct.front, struct.number, struct.shape = layer.front.pointer, number, shape
            struct.pages = ctypes.addressof(layer.front.pages_struct(layer.pages))
            struct.copies = None if layer.copies is None else layer.copies.pointer
            struct.shared = None if shared is None else shared.pointer
        self._struct = _TurnStepStruct(rank=-1)
        self._pointer = ctypes.addressof(self._struct)

    @property
    def place(self) -> tuple[int, int]:
        return self._struct.done, self._struct.rank

    def __call__(
        self,
        first: int,
        count: int,
        before: int,
        turns: Sequence[Any],
        plans: Sequence[Sequence[Any]],
        lanes: Sequence[NativeLane],
        key: StepKey,
        before_TD: Sequence[Tensor | None],
        shared_TD: Sequence[Tensor | None],
    ) -> StepEnd:
        struct, num_batches = self._struct, len(turns)
        for turn, given_TD in zip(turns, before_TD, strict=True):
            turn.give_shared(given_TD)
        pointers = Pointer * num_batches
        held = (
            (Pointer * len(lanes))(*[lane.pointer for lane in lanes]),
            pointers(*[turn.pointer for turn in turns]),
            (Pointer * (num_batches * len(plans[0])))(
                *[plan.pointer for each in plans for plan in each]
            ),
            pointers(*[address(each) for each in shared_TD]),
        )
        struct.lanes, struct.turns, struct.plans, struct.shared = [
            ctypes.addressof(each) for each in held
        ]
        struct.layers = ctypes.addressof(self._structs) + first * self._size
        struct.num_layers, struct.num_batches = count, num_batches
        struct.num_shapes, struct.before, struct.done = len(plans[0]), before, 0
        _set_key(struct.key, key)
        status = LaneStatus(self._function(self._pointer))
        return _end(status, struct, lanes)


class NativeServiceStep:
    """Implements ServiceStep."""

    def __init__(self, native: NativeLibrary) -> None:
        self._function = native.function("moe_service_step")
        self._struct = _ServiceStepStruct(rank=-1)
        self._pointer = ctypes.addressof(self._struct)
        self._layers: Any = None  # the structs, and the objects that they are of
        self._made: list[ExpertsOfLayer] = []

    @property
    def place(self) -> tuple[int, int]:
        return self._struct.done, self._struct.rank

    def __call__(
        self,
        layers: list[ExpertsOfLayer],
        rows: Sequence[Sequence[int]],
        lanes: Sequence[NativeLane],
        key: StepKey,
    ) -> StepEnd:
        struct, num_batches = self._struct, max(map(len, rows))
        if layers != self._made:
            self._make_layers(layers)
        flat = [n for each in rows for n in (*each, *([0] * (num_batches - len(each))))]
        held = (
            (Pointer * len(lanes))(*[lane.pointer for lane in lanes]),
            (Int * len(flat))(*flat),
        )
        struct.lanes, struct.rows = [ctypes.addressof(each) for each in held]
        struct.layers = ctypes.addressof(self._layers)
        struct.num_lanes, struct.num_layers = len(lanes), len(layers)
        struct.num_batches, struct.done = num_batches, 0
        _set_key(struct.key, key)
        status = LaneStatus(self._function(self._pointer))
        return _end(status, struct, lanes)

    def _make_layers(self, layers: list[ExpertsOfLayer]) -> None:
        self._layers, self._made = (_ServiceLayerStruct * len(layers))(), layers
        for struct, layer in zip(self._layers, layers, strict=True):
            assert isinstance(layer.bank, ExpertTable), "native experts"
            struct.service, struct.bank = layer.service.pointer, layer.bank.pointer
            struct.number = layer.number


def _set_key(struct: _KeyStruct, key: StepKey) -> None:
    struct.layer_at, struct.batch_at = key.layer_at, key.batch_at
    struct.first[: len(key.first)] = key.first


def _end(
    status: LaneStatus, struct: _TurnStepStruct | _ServiceStepStruct, lanes: Sequence[NativeLane]
) -> StepEnd:
    rank: int = struct.rank
    error = lanes[rank].struct.error if 0 <= rank < len(lanes) else 0
    return StepEnd(status, struct.done, rank, error)
