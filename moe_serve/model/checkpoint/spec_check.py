"""Refuses impossible numbers in a config before any weights are read."""

from __future__ import annotations

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec

_MAX_HEAD_DIM = 1024  # limit of the compiled kernels


def check_spec(spec: ModelSpec, config: HFConfig) -> None:
    """Raise CheckpointError, naming the file and the numbers that disagree."""
    for complaint in (_of_attention(spec), _of_router(spec), _of_tokens(spec)):
        if complaint:
            raise CheckpointError(f"{config.source}: {complaint}.")


def _of_attention(spec: ModelSpec) -> str | None:
    a = spec.attention
    if a.num_heads % a.num_kv_heads:
        return (
            f"num_attention_heads ({a.num_heads}) must be a multiple of num_key_value_heads "
            f"({a.num_kv_heads})"
        )
    if a.head_dim % 2 and spec.latent is None:
        return f"head_dim ({a.head_dim}) must be even"
    if a.head_dim > _MAX_HEAD_DIM:
        return f"heads of {a.head_dim} values are not served, only of up to {_MAX_HEAD_DIM}"
    for dim in {spec.rope_of(layer).dim for layer in range(spec.num_layers)}:
        if dim % 2 or not 0 < dim <= a.head_dim:
            return f"the {dim} rotated values must be an even part of {a.head_dim}"
    return None


def _of_router(spec: ModelSpec) -> str | None:
    r = spec.router.shape
    if r.top_k > r.num_experts:
        return f"num_experts_per_tok ({r.top_k}) exceeds num_experts ({r.num_experts})"
    if r.num_experts % r.num_groups:
        return f"{r.num_experts} experts do not make {r.num_groups} equal groups (n_group)"
    if r.num_groups_kept > r.num_groups:
        return f"topk_group ({r.num_groups_kept}) exceeds n_group ({r.num_groups})"
    size = r.num_experts // r.num_groups
    if r.num_groups > 1 and r.num_groups_kept * size < r.top_k:
        return (
            f"{r.num_groups_kept} groups (topk_group) of {size} experts are fewer than "
            f"num_experts_per_tok ({r.top_k})"
        )
    if r.num_groups > 1 and r.group_score == "top2" and size < 2:
        return f"{r.num_groups} groups (n_group) of one expert have no two best ones"
    if spec.router.is_weighing_inputs and r.top_k != 1:
        return f"num_experts_per_tok is {r.top_k}; only 1 is supported where weights scale inputs"
    return None


def _of_tokens(spec: ModelSpec) -> str | None:
    wrong = [i for i in spec.eos_token_ids if i >= spec.vocab_size]
    if wrong:
        return f"eos_token_id {wrong[0]} is outside the vocabulary of {spec.vocab_size} tokens"
    return None
