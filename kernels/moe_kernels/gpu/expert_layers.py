"""The expert layers of the models that the kernels ship for: compiled, measured and tuned."""

from __future__ import annotations

from dataclasses import dataclass

from moe_kernels.interface.kernels import GatedActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayerSizes:
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
        """Choices per row on this rank."""
        return self.top_k if self.num_ranks == 1 else 1

    def num_rows(self, num_tokens: int) -> int:
        """Returns the rows that this rank gets for `num_tokens` tokens."""
        if self.num_ranks == 1:
            return num_tokens
        return max(1, round(num_tokens * self.top_k / self.num_ranks))


GPT_OSS = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)
EXPERT_LAYERS = (
    ExpertLayerSizes(name="mixtral-8x7b", num_experts=8, top_k=2, width=4096, expert_width=14336),
    ExpertLayerSizes(name="qwen3-30b-a3b", num_experts=128, top_k=8, width=2048, expert_width=768),
    ExpertLayerSizes(
        name="deepseek-v3-rank-of-8", num_experts=256, top_k=8, width=7168, expert_width=2048,
        num_ranks=8,
    ),
    ExpertLayerSizes(
        name="deepseek-v3-rank-of-32", num_experts=256, top_k=8, width=7168, expert_width=2048,
        num_ranks=32,
    ),
    ExpertLayerSizes(
        name="gpt-oss-120b", num_experts=128, top_k=4, width=2880, expert_width=2880,
        activation=GPT_OSS, has_bias=True,
    ),
    ExpertLayerSizes(name="olmoe", num_experts=64, top_k=8, width=2048, expert_width=1024),
)  # fmt: skip
