"""Summarises a model's spec in a few words and numbers, for tables."""

from __future__ import annotations

import math
from collections import Counter

from moe_serve.model.checkpoint.manifest import all_tensors, expert_table
from moe_serve.model.families import Family
from moe_serve.model.rope import LinearScaling, Llama3Scaling, YarnScaling
from moe_serve.model.spec import ModelSpec

_BF16 = 2  # bytes


def num_parameters(family: Family, spec: ModelSpec) -> tuple[int, int]:
    """Returns the number of all parameters, and of those that one token uses.

    A token uses every matrix except the embedding (unless it is also the head) and the experts that
    it did not choose.
    """
    experts = family.names.experts[0]
    total = sum(math.prod(s.shape) for s in all_tensors(family.names, experts, spec))
    sparse = [i for i, layer in enumerate(spec.layers) if layer.is_sparse]
    routed = sum(
        math.prod(stored.shape)
        for layer in sparse
        for expert in range(spec.router.num_experts if experts.gate else 1)
        for stored in expert_table(experts, spec, layer, expert).values()
    )
    chosen = routed * spec.router.top_k // spec.router.num_experts
    embedding = 0 if spec.is_head_tied else spec.vocab_size * spec.width
    return total, total - routed + chosen - embedding


def in_billions(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e10 else f"{count / 1e9:.2f} B"


def layers(spec: ModelSpec) -> str:
    num_dense = sum(not layer.is_sparse for layer in spec.layers)
    return f"{spec.num_layers}, {num_dense} dense" if num_dense else f"{spec.num_layers}"


def experts(spec: ModelSpec) -> str:
    words = f"{spec.router.top_k} of {spec.router.num_experts}, width {spec.expert_width}"
    if spec.shared is not None:
        gated = "gated " if spec.shared.has_gate else ""
        words += f"; {gated}shared, width {spec.shared.width}"
    return words


def router(spec: ModelSpec) -> str:
    shape = spec.router.shape
    parts: list[str] = [shape.scoring]
    if shape.num_groups > 1:
        parts.append(f"{shape.num_groups_kept} of {shape.num_groups} groups")
    if spec.router.has_bias:
        parts.append("bias")
    if spec.router.has_selection_bias:
        parts.append("selection bias")
    if shape.is_renormalised:
        parts.append("renormalised")
    if shape.scaling != 1.0:
        parts.append(f"times {shape.scaling:g}")
    if spec.router.is_weighing_inputs:
        parts.append("weighs inputs")
    return ", ".join(parts)


def attention(spec: ModelSpec) -> str:
    return "; ".join([_heads(spec), *_per_layer(spec), *_positions(spec), *_extras(spec)])


def cache_per_token(spec: ModelSpec) -> str:
    return f"{spec.kv_bytes_per_token(_BF16) / 1024:.1f} KiB"


def _heads(spec: ModelSpec) -> str:
    a = spec.attention
    if spec.latent is not None:
        return f"{a.num_heads} heads on a latent of {spec.latent.latent_dim} + {spec.rope.dim}"
    if a.num_heads == a.num_kv_heads:
        return f"{a.num_heads} heads of {a.head_dim}"
    return f"{a.num_heads} heads of {a.head_dim} on {a.num_kv_heads}"


def _per_layer(spec: ModelSpec) -> list[str]:
    """Describes windows, chunks and layers without rotation, with the number of layers."""
    kinds: Counter[str] = Counter()
    for layer in spec.layers:
        if layer.attention.sliding_window is not None:
            kinds[f"window {layer.attention.sliding_window}"] += 1
        if layer.attention.chunk is not None:
            kinds[f"chunks of {layer.attention.chunk}"] += 1
        if not layer.has_rotation:
            kinds["no rotation"] += 1
    return [
        kind if count == spec.num_layers else f"{kind} in {count} layers"
        for kind, count in kinds.items()
    ]


def _positions(spec: ModelSpec) -> list[str]:
    parts = []
    if spec.latent is None and spec.rope.dim != spec.attention.head_dim:
        parts.append(f"{spec.rope.dim} values rotated")
    match spec.rope.scaling:
        case YarnScaling(factor=factor):
            parts.append(f"YaRN {factor:g}")
        case Llama3Scaling(factor=factor):
            parts.append(f"Llama 3 scaling {factor:g}")
        case LinearScaling(factor=factor):
            parts.append(f"linear scaling {factor:g}")
        case None:
            pass
    if spec.query_temperature is not None:
        parts.append("temperature")
    return parts


def _extras(spec: ModelSpec) -> list[str]:
    a = spec.attention
    return [
        words
        for words, is_there in (
            ("sinks", a.has_sinks),
            (f"q/k norm per {a.qk_norm}", a.qk_norm != "none"),
            ("biases", spec.has_attention_bias),
        )
        if is_there
    ]
