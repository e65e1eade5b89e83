"""The implementations of an expert layer: our kernels, torch's operators, and installed peers.

Each is created once per layer from the same weights, and then called with rows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_bench.expert_work import LayerRows, LayerWeights
from moe_kernels.kernel_choice import KernelsName, choose_kernels, native_refusal
from moe_kernels.reference.expert_mlp import activate, combine_choices

Layer = Callable[[LayerRows], Tensor]
REFERENCE = "F.linear loop"
BOUND = "dense bmm"  # the same work without routing: not a competitor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertContestant:
    """One implementation: `make` creates the layer from weights [E, ..].

    `is_capturable` says that a CUDA graph can capture it.
    """

    name: str
    make: Callable[[LayerWeights], Layer]
    is_capturable: bool = True
    is_exact: bool = True  # its result is that of the layer


def contestants(device: torch.device, dtype: torch.dtype) -> list[ExpertContestant]:
    """Returns the reference first, then our kernels, then the others that this machine has."""
    found = [ExpertContestant(name=REFERENCE, make=_linear_loop, is_capturable=False)]
    if device.type == "cpu":
        names: list[KernelsName] = ["torch"]
        if native_refusal(device, dtype) is None:
            names.insert(0, "native")
        found += [_own(f"moe-serve {name}", device, dtype, name) for name in names]
    else:
        found.append(_own("moe-serve", device, dtype, "auto"))
    found.append(ExpertContestant(name="grouped_mm", make=_grouped_mm))
    found.append(ExpertContestant(name=BOUND, make=_dense, is_exact=False))
    if device.type == "cuda":
        found += [
            ExpertContestant(name=name, make=make)
            for name, make in (("vllm", _vllm), ("flashinfer", _flashinfer))
            if importlib.util.find_spec(name) is not None
        ]
    return found


def _own(
    name: str, device: torch.device, dtype: torch.dtype, kernels: KernelsName
) -> ExpertContestant:
    def make(weights: LayerWeights) -> Layer:
        chosen = choose_kernels(device, dtype, kernels)
        bank = chosen.experts(weights.experts(), weights.shape.activation)
        return lambda rows: bank(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)

    return ExpertContestant(name=name, make=make, is_capturable=kernels != "torch")


def _hidden(gate_up: Tensor, weights: LayerWeights) -> Tensor:
    """Maps [R, 2F] to [R, F] as models do: SwiGLU in the model's dtype, other activations in
    fp32.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if not weights.shape.has_bias:
        return F.silu(gate) * up
    return activate(gate.float(), up.float(), weights.shape.activation).to(gate.dtype)


def _linear_loop(weights: LayerWeights) -> Layer:
    """Runs one pair of linears per activated expert, with the counts on the host."""

    def layer(rows: LayerRows) -> Tensor:
        order, source, ids = _sorted(rows)
        counts = torch.bincount(ids, minlength=len(weights.down)).tolist()
        outputs, start = [], 0
        for e, count in enumerate(counts):
            if count:
                x = rows.x_TD[source[start : start + count]]
                bias, down_bias = (
                    None if b is None else b[e] for b in (weights.gate_up_bias, weights.down_bias)
                )
                hidden = _hidden(F.linear(x, weights.gate_up[e], bias), weights)
                outputs.append(F.linear(hidden, weights.down[e], down_bias))
                start += count
        return _combined(torch.cat(outputs), order, rows)

    return layer


def _grouped_mm(weights: LayerWeights) -> Layer:
    """Runs torch's grouped product over sorted rows."""
    product: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    gate_up, down = weights.gate_up.transpose(1, 2), weights.down.transpose(1, 2)

    def layer(rows: LayerRows) -> Tensor:
        order, source, ids = _sorted(rows)
        experts = torch.arange(len(weights.down), device=ids.device)
        ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)
        y = product(rows.x_TD[source], gate_up, offs=ends)
        if weights.gate_up_bias is not None:
            y = y + weights.gate_up_bias[ids]
        y = product(_hidden(y, weights), down, offs=ends)
        if weights.down_bias is not None:
            y = y + weights.down_bias[ids]
        return _combined(y, order, rows)

    return layer


def _dense(weights: LayerWeights) -> Layer:
    """Runs as many experts as are activated, each with the same number of rows.

    There is no sorting, gathering or combining: this is the speed of the vendor's library for the
    arithmetic alone.
    """

    batches: dict[tuple[int, int], Tensor] = {}

    def layer(rows: LayerRows) -> Tensor:
        num_each = -(-rows.expert_ids_TK.numel() // rows.num_active)
        key = (rows.num_active, num_each)
        if key not in batches:  # at the warm-up
            x = torch.randn(*key, rows.x_TD.shape[1], device=rows.x_TD.device)
            batches[key] = x.to(rows.x_TD.dtype)
        y = torch.bmm(batches[key], weights.gate_up[: rows.num_active].transpose(1, 2))
        return torch.bmm(_hidden(y, weights), weights.down[: rows.num_active].transpose(1, 2))

    return layer


def _vllm(weights: LayerWeights) -> Layer:
    module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe")
    _refuse_bias(weights)
    return lambda rows: module.fused_experts(
        rows.x_TD,
        weights.gate_up,
        weights.down,
        rows.weights_TK,
        rows.expert_ids_TK.to(torch.int32),
    )


def _flashinfer(weights: LayerWeights) -> Layer:
    """Runs flashinfer's experts, whose first product has the rows of up before those of gate."""
    module: Any = importlib.import_module("flashinfer.fused_moe")
    _refuse_bias(weights)
    up_gate = torch.cat(weights.gate_up.chunk(2, dim=1)[::-1], dim=1)
    return lambda rows: module.cutlass_fused_moe(
        rows.x_TD,
        rows.expert_ids_TK.to(torch.int32),
        rows.weights_TK,
        up_gate,
        weights.down,
        rows.x_TD.dtype,
        quant_scales=None,
    )[0]


def _refuse_bias(weights: LayerWeights) -> None:
    if weights.shape.has_bias:
        raise ValueError("a layer with biases: this contestant is measured without them only")


def _sorted(rows: LayerRows) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the order of choices by expert, the row of each choice, and its expert; [R] each."""
    flat = rows.expert_ids_TK.reshape(-1)
    ids, order = flat.sort(stable=True)
    return order, order // rows.expert_ids_TK.shape[1], ids


def _combined(y_RD: Tensor, order: Tensor, rows: LayerRows) -> Tensor:
    back = torch.empty_like(y_RD)
    back[order] = y_RD
    return combine_choices(back.view(*rows.expert_ids_TK.shape, -1), rows.weights_TK).float()
