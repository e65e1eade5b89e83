"""How a checkpoint names its tensors. `{layer}` and `{expert}` are filled in."""

from __future__ import annotations

from dataclasses import dataclass

_LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The defaults are the common Llama-like names; a family states what differs."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    attention_norm: str = _LAYER + "input_layernorm.weight"
    moe_norm: str = _LAYER + "post_attention_layernorm.weight"
    q: str = _LAYER + "self_attn.q_proj.weight"
    k: str = _LAYER + "self_attn.k_proj.weight"
    v: str = _LAYER + "self_attn.v_proj.weight"
    o: str = _LAYER + "self_attn.o_proj.weight"
    q_norm: str = _LAYER + "self_attn.q_norm.weight"
    k_norm: str = _LAYER + "self_attn.k_norm.weight"
    router: str = _LAYER + "mlp.gate.weight"
    expert_gate: str = _LAYER + "mlp.experts.{expert}.gate_proj.weight"
    expert_up: str = _LAYER + "mlp.experts.{expert}.up_proj.weight"
    expert_down: str = _LAYER + "mlp.experts.{expert}.down_proj.weight"


def bias_of(weight_name: str) -> str:
    """`...q_proj.weight` -> `...q_proj.bias`."""
    return weight_name.removesuffix("weight") + "bias"
