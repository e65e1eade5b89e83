"""A layer's experts in the native kernels.

T rows, K choices per row, D model width, F expert width, E experts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import Float, Int, NativeLibrary, Pointer, num_panels
from moe_kernels.cpu.native_forms import FormStruct, NativeForm
from moe_kernels.cpu.native_rows import NativeRows, rows_of_additions
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation

_UNIT_BYTES = 4


class ExpertsStruct(ctypes.Structure):
    """`Experts` in cpu/experts.cpp. The first four are arrays of pointers by expert, or null."""

    _fields_ = (
        ("gate_up", Pointer),
        ("down", Pointer),
        ("gate_up_bias", Pointer),
        ("down_bias", Pointer),
        ("num_experts", Int),
        ("width", Int),
        ("expert_width", Int),
        ("threads", Int),
        ("alpha", Float),
        ("limit", Float),
        ("up_offset", Float),
        ("gate_up_form", FormStruct),
        ("down_form", FormStruct),
    )


class Addresses:
    """One pointer for each expert id, null where the expert is not here."""

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_void_p * count)()
        self.tensors: dict[int, Tensor] = {}  # what the pointers point to

    def put(self, expert_id: int, tensor: Tensor) -> None:
        self.tensors[expert_id] = tensor
        self.array[expert_id] = tensor.data_ptr()

    def drop(self, expert_id: int) -> None:
        self.array[expert_id] = None
        self.tensors.pop(expert_id, None)

    @property
    def pointer(self) -> int | None:
        return ctypes.addressof(self.array) if self.tensors else None


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert as the kernels read it. Biases: gate's and up's, and down's, in fp32."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertPanels:
    """Packs experts of gate and up [F, D] and down [D, F]: panels of gate and up alternate, so that
    one product computes both."""

    native: NativeLibrary
    d: int
    f: int
    gate_up: NativeForm
    down: NativeForm

    @classmethod
    def of(cls, native: NativeLibrary, expert: ExpertWeights) -> ExpertPanels:
        f, d = expert.gate.shape
        forms = (NativeForm.of(native, weight) for weight in (expert.gate, expert.down))
        return cls(native, d, f, *forms)

    @property
    def sizes(self) -> list[int]:
        """The 32-bit units of gate and up, and of down."""
        up_panels, down_panels = 2 * num_panels(self.f), num_panels(self.d)
        return [self.gate_up.num_units(up_panels), self.down.num_units(down_panels)]

    def pack(self, expert: ExpertWeights, memory: Tensor) -> PackedExpert:
        """Packs an expert into memory of `sum(sizes)` units."""
        f, d = expert.gate.shape
        assert (f, d) == (self.f, self.d), f"an expert is {f} x {d}, others {self.f} x {self.d}"
        gate_up, packed_down = memory.split(self.sizes)
        self.gate_up.pack(expert.gate, gate_up, 2 * num_panels(f), first=0, stride=2)
        self.gate_up.pack(expert.up, gate_up, 2 * num_panels(f), first=1, stride=2)
        self.down.pack(expert.down, packed_down, num_panels(d))
        if expert.gate_bias is None:
            return PackedExpert(gate_up, packed_down)
        assert expert.up_bias is not None and expert.down_bias is not None, "all or none"
        both = torch.cat((expert.gate_bias, expert.up_bias)).float()
        return PackedExpert(gate_up, packed_down, both, expert.down_bias.float().clone())


class ExpertTable:
    """Implements ExpertBank over packed experts, which come and go. With the first one that has
    biases, all have."""

    def __init__(self, panels: ExpertPanels, count: int, activation: GatedActivation) -> None:
        native = panels.native
        self.panels, self.activation = panels, activation
        self._function = native.function("moe_experts")
        self._partial_function = native.function("moe_experts_partial")
        self._addresses = gate_up, down, *_ = [Addresses(count) for _ in range(4)]
        self._d, self._struct = panels.d, ExpertsStruct(
            ctypes.addressof(gate_up.array), ctypes.addressof(down.array), None, None,
            count, panels.d, panels.f, native.threads,
            activation.alpha,
            math.inf if activation.limit is None else activation.limit,
            activation.up_offset,
            panels.gate_up.struct, panels.down.struct,
        )  # fmt: skip
        self._pointer = ctypes.addressof(self._struct)

    @property
    def pointer(self) -> int:
        """Address of the struct that describes it, for kernels that call this one."""
        return self._pointer

    def put(self, expert_id: int, packed: PackedExpert) -> None:
        gate_up, down, gate_up_bias, down_bias = self._addresses
        gate_up.put(expert_id, packed.gate_up)
        down.put(expert_id, packed.down)
        if packed.gate_up_bias is not None and packed.down_bias is not None:
            gate_up_bias.put(expert_id, packed.gate_up_bias)
            down_bias.put(expert_id, packed.down_bias)
            self._struct.gate_up_bias = gate_up_bias.pointer
            self._struct.down_bias = down_bias.pointer

    def drop(self, expert_id: int) -> None:
        for addresses in self._addresses:
            addresses.drop(expert_id)

    @property
    def num_experts(self) -> int:
        return int(self._struct.num_experts)

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TD = torch.empty(len(x_TD), self._d, dtype=torch.float32)
        self._run(self._function, x_TD, expert_ids_TK, weights_TK, out_TD)
        return out_TD

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.added_partial(x_TD, expert_ids_TK, weights_TK, None)

    def added_partial(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, added: RowAdditions | None
    ) -> Tensor:
        """Implements AddingBank. None: nothing is added."""
        out_TD = torch.empty(len(x_TD), self._d, dtype=torch.float64)
        rows = None if added is None else rows_of_additions(added)
        self._run(self._partial_function, x_TD, expert_ids_TK, weights_TK, out_TD, rows)
        return out_TD

    def _run(
        self,
        function: ctypes._NamedFuncPointer,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        out_TD: Tensor,
        rows: NativeRows | None = None,
    ) -> None:
        num_rows, top_k = expert_ids_TK.shape
        absent = function(
            self._pointer, x_TD.data_ptr(), expert_ids_TK.data_ptr(), weights_TK.data_ptr(),
            out_TD.data_ptr(), num_rows, top_k, None if rows is None else rows.pointer, 0, 0,
        )  # fmt: skip
        assert not absent, absence(absent)


def absence(absent: int) -> str:
    """Explains a kernel's return value: 1 plus the number of an expert that is not held."""
    return f"rows were sent for expert {absent - 1}, which this rank does not hold"


@runtime_checkable
class LazyExperts(Protocol):
    """A sequence of experts with a known length, which reads an expert when it is accessed."""

    @property
    def num_held(self) -> int: ...


def _num_held(experts: Sequence[ExpertWeights | None]) -> int:
    """Counts the held experts of a bank, without reading those that are read on demand."""
    if isinstance(experts, LazyExperts):
        return experts.num_held
    return sum(expert is not None for expert in experts)


def native_experts(
    native: NativeLibrary,
    experts: Sequence[ExpertWeights | None],
    activation: GatedActivation,
) -> ExpertTable:
    """Builds a bank of experts that stay. `experts` is read once, in order, so it may read tensors
    on demand. Memory for all experts is reserved at once, and used when it is written."""
    most, slot = _num_held(experts), 0
    assert most, "a bank without experts has nothing to compute"
    for expert_id, expert in enumerate(experts):
        if expert is None:
            continue
        if not slot:
            panels = ExpertPanels.of(native, expert)
            table = ExpertTable(panels, len(experts), activation)
            memory = native.empty_packed(most, sum(panels.sizes))
        table.put(expert_id, panels.pack(expert, memory[slot]))
        slot += 1
    return table


class NativeSlots:
    """Implements ExpertSlots. Memory for all slots is reserved at once."""

    def __init__(
        self,
        native: NativeLibrary,
        sample: ExpertWeights,
        activation: GatedActivation,
        max_bytes: int,
        most: int,
    ) -> None:
        self._panels, self._activation = ExpertPanels.of(native, sample), activation
        size = sum(self._panels.sizes)
        biases = (sample.gate_bias, sample.up_bias, sample.down_bias)
        num_biases = sum(0 if bias is None else bias.numel() for bias in biases)
        self.slot_bytes = _UNIT_BYTES * (size + num_biases)
        self.num_slots = min(most, max_bytes // self.slot_bytes)
        self._memory = native.empty_packed(self.num_slots, size)
        self._packed: list[PackedExpert | None] = [None] * self.num_slots

    def write(self, slot: int, weights: ExpertWeights) -> None:
        self._packed[slot] = self._panels.pack(weights, self._memory[slot])

    def bank(self, num_experts: int) -> NativeSlotBank:
        return NativeSlotBank(self._packed, self._panels, num_experts, self._activation)


class NativeSlotBank(ExpertTable):
    """Implements SlotBank: a table whose experts are named by their slots."""

    def __init__(
        self,
        packed: list[PackedExpert | None],
        panels: ExpertPanels,
        num_experts: int,
        activation: GatedActivation,
    ) -> None:
        super().__init__(panels, num_experts, activation)
        self._packed = packed

    def point(self, expert: int, slot: int | None) -> None:
        if slot is None:
            self.drop(expert)
            return
        packed = self._packed[slot]
        assert packed is not None, f"slot {slot} is empty"
        self.put(expert, packed)
