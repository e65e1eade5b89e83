"""The expert layers and the attention that are measured."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.gpu.expert_layers import EXPERT_LAYERS, ExpertLayerSizes
from moe_kernels.interface.attention_shape import AttentionShape

ALL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_TOKENS = (1, 4, 16)


LAYERS = (
    *EXPERT_LAYERS,
    ExpertLayerSizes(name="random-1b", num_experts=32, top_k=4, width=1024, expert_width=768),
    ExpertLayerSizes(name="tiny", num_experts=8, top_k=2, width=64, expert_width=96),
)
GPU_LAYERS = tuple(layer.name for layer in EXPERT_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """One token for each of `num_sequences`, each after `context` tokens in the cache."""

    name: str
    num_sequences: int
    context: int
    attention: AttentionShape


DECODES = (
    DecodeShape(
        name="decode-64x4096", num_sequences=64, context=4096,
        attention=AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128),
    ),
    DecodeShape(
        name="decode-1x4096", num_sequences=1, context=4096,
        attention=AttentionShape(num_heads=32, num_kv_heads=4, head_dim=128),
    ),
    DecodeShape(
        name="decode-tiny", num_sequences=3, context=40,
        attention=AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16),
    ),
)  # fmt: skip
GPU_DECODES = tuple(decode.name for decode in DECODES if decode.name != "decode-tiny")
