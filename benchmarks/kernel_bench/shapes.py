"""The expert layers and the attention that are measured."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.attention_shape import AttentionShape
from moe_kernels.kernels import GatedActivation

ALL_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_TOKENS = (1, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The experts of one layer, or one expert rank's share of them.

    With `num_ranks` above 1 a rank has num_experts / num_ranks experts, and of T tokens in the
    whole deployment it gets about T top_k / num_ranks rows, each with one choice.
    """

    name: str
    num_experts: int
    top_k: int
    width: int
    expert_width: int
    num_ranks: int = 1
    activation: GatedActivation = GatedActivation()
    has_bias: bool = False

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_choices(self) -> int:
        """Choices per row here."""
        return self.top_k if self.num_ranks == 1 else 1

    def num_rows(self, num_tokens: int) -> int:
        """Rows that come here of `num_tokens` tokens."""
        if self.num_ranks == 1:
            return num_tokens
        return max(1, round(num_tokens * self.top_k / self.num_ranks))


GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
LAYERS = (
    LayerShape(name="mixtral-8x7b", num_experts=8, top_k=2, width=4096, expert_width=14336),
    LayerShape(name="qwen3-30b-a3b", num_experts=128, top_k=8, width=2048, expert_width=768),
    LayerShape(
        name="deepseek-v3-rank-of-8", num_experts=256, top_k=8, width=7168, expert_width=2048,
        num_ranks=8,
    ),
    LayerShape(
        name="deepseek-v3-rank-of-32", num_experts=256, top_k=8, width=7168, expert_width=2048,
        num_ranks=32,
    ),
    LayerShape(
        name="gpt-oss-120b", num_experts=128, top_k=4, width=2880, expert_width=2880,
        activation=GPT_OSS, has_bias=True,
    ),
    LayerShape(name="olmoe", num_experts=64, top_k=8, width=2048, expert_width=1024),
    LayerShape(name="random-1b", num_experts=32, top_k=4, width=1024, expert_width=768),
    LayerShape(name="tiny", num_experts=8, top_k=2, width=64, expert_width=96),
)  # fmt: skip
GPU_LAYERS = tuple(layer.name for layer in LAYERS if layer.name not in ("random-1b", "tiny"))


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
