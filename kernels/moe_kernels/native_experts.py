"""A layer's experts in the native kernels.

T rows, K choices per row, D model width, F expert width, E experts.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.kernels import ExpertWeights, GatedActivation, num_held
from moe_kernels.native_library import Float, Int, NativeLibrary, Pointer, num_panels
from moe_kernels.quantised_matrix import only_floats


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
    )


class Addresses:
    """One pointer for each expert id, null where the expert is not here."""

    def __init__(self, count: int) -> None:
        self.array = (ctypes.c_void_p * count)()
        self._tensors: list[Tensor] = []  # what the pointers point to

    def put(self, expert_id: int, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self.array[expert_id] = tensor.data_ptr()

    @property
    def pointer(self) -> int | None:
        return ctypes.addressof(self.array) if self._tensors else None


class NativeExperts:
    """Implements ExpertBank. Panels of gate and up lie by turns, so that one product has both.

    `experts` is read once, in order, so it may read its tensors when it is asked for them.
    """

    def __init__(
        self,
        native: NativeLibrary,
        experts: Sequence[ExpertWeights | None],
        activation: GatedActivation,
    ) -> None:
        self._function = native.function("moe_experts")
        self._partial_function = native.function("moe_experts_partial")
        self._native, count = native, len(experts)
        self._gate_up, self._down, self._gate_up_bias, self._down_bias = (
            Addresses(count) for _ in range(4)
        )
        self._memory: Tensor | None = None
        slot, most = 0, num_held(experts)
        assert most, "a bank without experts has nothing to compute"
        for expert_id, expert in enumerate(experts):
            if expert is not None:
                self._add(expert_id, slot, most, expert)
                slot += 1
        self._struct = ExpertsStruct(
            *(a.pointer for a in (self._gate_up, self._down, self._gate_up_bias, self._down_bias)),
            count, self._d, self._f, native.threads,
            activation.alpha,
            math.inf if activation.limit is None else activation.limit,
            activation.up_offset,
        )  # fmt: skip
        self._pointer = ctypes.addressof(self._struct)

    def _add(self, expert_id: int, slot: int, most: int, expert: ExpertWeights) -> None:
        """Pack an expert. Memory for `most` is reserved at once, and taken when it is written."""
        gate, up, down = (only_floats(w) for w in (expert.gate, expert.up, expert.down))
        native, (f, d) = self._native, gate.shape
        assert gate.dtype == native.dtype, f"{gate.dtype} expert for {native.dtype}"
        up_panels, down_panels = 2 * num_panels(f), num_panels(d)
        sizes = [native.packed_size(up_panels, d), native.packed_size(down_panels, f)]
        if self._memory is None:
            self._f, self._d = f, d
            self._memory = native.empty_packed(most, sum(sizes))
        assert (f, d) == (self._f, self._d), f"expert {expert_id} is {f} x {d}, others are not"
        packed_gate_up, packed_down = self._memory[slot].split(sizes)
        native.pack(gate, packed_gate_up, up_panels, first=0, stride=2)
        native.pack(up, packed_gate_up, up_panels, first=1, stride=2)
        native.pack(down, packed_down, down_panels)
        self._gate_up.put(expert_id, packed_gate_up)
        self._down.put(expert_id, packed_down)
        if expert.gate_bias is not None:
            assert expert.up_bias is not None and expert.down_bias is not None, "all or none"
            both = torch.cat((expert.gate_bias, expert.up_bias)).float()
            self._gate_up_bias.put(expert_id, both)
            self._down_bias.put(expert_id, expert.down_bias.float().clone())

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._run(self._function, torch.float32, x_TD, expert_ids_TK, weights_TK)

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._run(self._partial_function, torch.float64, x_TD, expert_ids_TK, weights_TK)

    def _run(
        self,
        function: ctypes._NamedFuncPointer,
        dtype: torch.dtype,
        x_TD: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        num_rows, top_k = expert_ids_TK.shape
        out_TD = torch.empty(num_rows, self._d, dtype=dtype)
        absent = function(
            self._pointer, x_TD.data_ptr(), expert_ids_TK.data_ptr(), weights_TK.data_ptr(),
            out_TD.data_ptr(), num_rows, top_k,
        )  # fmt: skip
        assert not absent, f"rows were sent for expert {absent - 1}, which is not here"
        return out_TD
