"""An MLP whose columns several processes share, in the native kernels.

T rows, D model width, F width of the hidden layer.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from moe_kernels.cpu.cpu_library import NativeLibrary, num_panels
from moe_kernels.cpu.native_experts import Addresses, ExpertsStruct
from moe_kernels.cpu.native_forms import NativeForm
from moe_kernels.cpu.native_rows import rows_of_additions
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.kernels import ExpertWeights, GatedActivation


class NativeSplitMLP:
    """Implements SplitMLP. Each half is described as an expert without its other half."""

    def __init__(
        self, native: NativeLibrary, weights: ExpertWeights, activation: GatedActivation
    ) -> None:
        gate, up, down = weights.gate, weights.up, weights.down
        self._hidden_function = native.function("moe_mlp_hidden")
        self._down_function = native.function("moe_mlp_down")
        self._addresses = [Addresses(1) for _ in range(4)]
        gate_up, packed_down, gate_up_bias, down_bias = self._addresses
        (self._num_hidden, d), (self._num_outputs, f) = gate.shape, down.shape
        form, panels = NativeForm.of(native, gate), 2 * num_panels(self._num_hidden)
        memory = native.empty_packed(form.num_units(panels))
        form.pack(gate, memory, panels, first=0, stride=2)
        form.pack(up, memory, panels, first=1, stride=2)
        gate_up.put(0, memory)
        down_form, panels = NativeForm.of(native, down), num_panels(self._num_outputs)
        memory = native.empty_packed(down_form.num_units(panels))
        down_form.pack(down, memory, panels)
        packed_down.put(0, memory)
        if weights.gate_bias is not None:
            assert weights.up_bias is not None and weights.down_bias is not None, "all or none"
            gate_up_bias.put(0, torch.cat((weights.gate_bias, weights.up_bias)).float())
            down_bias.put(0, weights.down_bias.float().clone())
        constants = (
            native.threads,
            activation.alpha,
            math.inf if activation.limit is None else activation.limit,
            activation.up_offset,
            form.struct,
            down_form.struct,
        )
        self._up = ExpertsStruct(
            gate_up.pointer, None, gate_up_bias.pointer, None, 1, d, self._num_hidden, *constants
        )
        self._down = ExpertsStruct(
            None, packed_down.pointer, None, down_bias.pointer, 1, self._num_outputs, f, *constants
        )

    def hidden(self, x_TD: Tensor, added: RowAdditions | None = None) -> Tensor:
        assert x_TD.is_contiguous(), f"rows lie at {x_TD.stride()}"
        hidden_TF = x_TD.new_empty(len(x_TD), self._num_hidden)
        rows = None if added is None else rows_of_additions(added)
        self._hidden_function(
            ctypes.addressof(self._up), x_TD.data_ptr(), hidden_TF.data_ptr(), len(x_TD),
            None if rows is None else rows.pointer,
        )  # fmt: skip
        return hidden_TF

    def output(
        self, hidden_TF: Tensor, weights_T1: Tensor, added: RowAdditions | None = None
    ) -> Tensor:
        assert hidden_TF.is_contiguous(), f"rows lie at {hidden_TF.stride()}"
        out_TD = torch.empty(len(hidden_TF), self._num_outputs, dtype=torch.float32)
        rows = None if added is None else rows_of_additions(added)
        self._down_function(
            ctypes.addressof(self._down), hidden_TF.data_ptr(), weights_T1.data_ptr(),
            out_TD.data_ptr(), len(hidden_TF), None if rows is None else rows.pointer,
        )  # fmt: skip
        return out_TD
