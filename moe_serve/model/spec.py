"""What a model is, in numbers: all that the runtime knows of an architecture.

A family (`model/families/`) makes it from a Hugging Face config; nothing else knows a model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_kernels.attention_shape import AttentionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """Softmax over all experts, then top-k; `is_renormalised`: weights divided by their sum."""

    num_experts: int
    top_k: int
    is_renormalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: angle = position / factor * theta^(-2 i / head_dim)."""

    theta: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder whose every layer is attention, then a mixture of experts."""

    family: str
    vocab_size: int
    width: int
    num_layers: int
    expert_width: int
    attention: AttentionShape
    has_attention_bias: bool  # of q, k and v
    has_output_bias: bool
    router: RouterSpec
    rope: RopeSpec
    norm_eps: float
    is_head_tied: bool
    max_positions: int
    dtype: Literal["float32", "bfloat16", "float16"]
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that one token holds in the KV cache, over all layers."""
        kv_values = 2 * self.attention.num_kv_heads * self.attention.head_dim
        return self.num_layers * kv_values * itemsize
