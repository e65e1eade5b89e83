"""Converts our parameter names to those of a Hugging Face `Qwen3MoeForCausalLM`, and back.

Stacked experts [E, ...] become one tensor per expert; the tied head is not stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOP = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_norm": "self_attn.q_norm.weight",
    "attention.k_norm": "self_attn.k_norm.weight",
    "moe_norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.gate.weight",
}
_EXPERT = {"moe.gate": "gate_proj", "moe.up": "up_proj", "moe.down": "down_proj"}


def hf_names(name: str, num_experts: int) -> list[str]:
    """Returns the Hugging Face name of `name`; for stacked experts, one name per expert in order.

    `layers.2.moe.up` -> `model.layers.2.mlp.experts.0.up_proj.weight`, `...experts.1.up_proj...`.
    """
    if name in _TOP:
        return [_TOP[name]]
    _, layer, rest = name.split(".", 2)
    if rest in _EXPERT:
        prefix = f"model.layers.{layer}.mlp.experts"
        return [f"{prefix}.{e}.{_EXPERT[rest]}.weight" for e in range(num_experts)]
    return [f"model.layers.{layer}.{_LAYER[rest]}"]


def to_hf(weights: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Converts our fp32 weights to Hugging Face tensors in bf16."""
    tensors = {}
    for name, weight in weights.items():
        names = hf_names(name, num_experts)
        parts = weight.unbind(0) if len(names) > 1 else (weight,)
        for hf_name, part in zip(names, parts, strict=True):
            tensors[hf_name] = part.to(torch.bfloat16).contiguous()
    return tensors


def from_hf(tensors: dict[str, Tensor], names: list[str], num_experts: int) -> dict[str, Tensor]:
    """Inverts `to_hf` for our parameters `names`, in fp32 (bf16 values are kept exactly)."""
    weights = {}
    for name in names:
        parts = [tensors[hf_name].float() for hf_name in hf_names(name, num_experts)]
        weights[name] = torch.stack(parts) if len(parts) > 1 else parts[0]
    return weights
