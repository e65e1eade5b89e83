"""Converts fused experts to the other layouts that checkpoints have."""

from __future__ import annotations

from torch import Tensor

Tensors = dict[str, Tensor]


def swapped(tensors: Tensors) -> Tensors:
    """Converts [E, 2 F, D] <-> [E, D, 2 F], and the down projections likewise."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def separate(tensors: Tensors) -> Tensors:
    """Splits fused [E, 2 F, D] and [E, D, F] into single experts, as tools store those that they
    quantise."""
    result = {}
    for name, fused in tensors.items():
        stem, _, part = name.rpartition(".experts.")
        if not stem:
            result[name] = fused
            continue
        for expert, matrix in enumerate(fused):
            parts = {"down_proj": matrix}
            if part == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            result |= {
                f"{stem}.experts.{expert}.{key}.weight": weight.contiguous()
                for key, weight in parts.items()
            }
    return result


def swapped_and_separate(tensors: Tensors) -> Tensors:
    """Splits fused experts that are stored swapped (Llama 4) into single experts."""
    return separate(swapped(tensors))
