"""Lists the tensors of a family's checkpoint, and makes its config.json.

D model width, F expert width, E experts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a model; the defaults make a Qwen3-MoE of 1.26 B parameters."""

    num_layers: int = 16
    width: int = 1024
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 64
    num_experts: int = 32
    top_k: int = 4
    expert_width: int = 768
    vocab_size: int = 4096
    max_positions: int = 4096
    is_tied: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to create. `std` None means ones (a norm's weight)."""

    name: str
    shape: tuple[int, ...]
    std: float | None


@dataclass(frozen=True, slots=True)
class Family:
    """The names that one family uses."""

    architecture: str
    moe: str  # the MoE block inside a layer
    expert_parts: tuple[str, str, str]  # gate, up, down
    norm_widths: Callable[[Sizes], tuple[int, int] | None]  # of q_norm and k_norm
    config: Callable[[Sizes], dict[str, object]]

    def check(self, sizes: Sizes) -> None:
        """Raise ValueError if the family cannot have these sizes."""
        if self is FAMILIES["olmoe"] and sizes.num_heads * sizes.head_dim != sizes.width:
            raise ValueError(
                f"olmoe has heads of width / num_heads ({sizes.width} / {sizes.num_heads}), "
                f"got {sizes.head_dim}; set --head-dim or --num-heads."
            )


FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        lambda s: (s.head_dim, s.head_dim),
        lambda s: {
            "num_experts": s.num_experts,
            "moe_intermediate_size": s.expert_width,
            "intermediate_size": s.top_k * s.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "head_dim": s.head_dim,
            "attention_bias": False,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        lambda s: None,
        lambda s: {
            "num_local_experts": s.num_experts,
            "intermediate_size": s.expert_width,
            "head_dim": s.head_dim,
            "sliding_window": None,
        },
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "mlp",
        ("gate_proj", "up_proj", "down_proj"),
        lambda s: (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim),
        lambda s: {
            "num_experts": s.num_experts,
            "intermediate_size": s.expert_width,
            "norm_topk_prob": False,
            "clip_qkv": None,
            "attention_bias": False,
        },
    ),
}


def model_config(family: str, sizes: Sizes, dtype: str) -> dict[str, object]:
    """Returns config.json; it has the rotary base twice, for transformers 4 and 5."""
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_experts_per_tok": sizes.top_k,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "max_position_embeddings": sizes.max_positions,
        "tie_word_embeddings": sizes.is_tied,
        "output_router_logits": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": dtype,
        **FAMILIES[family].config(sizes),
    }


def tensor_specs(family: str, sizes: Sizes) -> Iterator[TensorSpec]:
    """Yields all tensors in file order. Scales keep activations and logits near 1 at any depth."""
    d = sizes.width
    yield TensorSpec(
        "model.embed_tokens.weight", (sizes.vocab_size, d), d**-0.5 if sizes.is_tied else 1.0
    )
    for layer in range(sizes.num_layers):
        yield from _layer(FAMILIES[family], f"model.layers.{layer}", sizes)
    yield TensorSpec("model.norm.weight", (d,), None)
    if not sizes.is_tied:
        yield TensorSpec("lm_head.weight", (sizes.vocab_size, d), d**-0.5)


def _layer(family: Family, prefix: str, sizes: Sizes) -> Iterator[TensorSpec]:
    d, f = sizes.width, sizes.expert_width
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    into_residual = (2 * sizes.num_layers) ** -0.5
    yield TensorSpec(f"{prefix}.input_layernorm.weight", (d,), None)
    for name, rows in (("q", q), ("k", kv), ("v", kv)):
        yield TensorSpec(f"{prefix}.self_attn.{name}_proj.weight", (rows, d), d**-0.5)
    yield TensorSpec(f"{prefix}.self_attn.o_proj.weight", (d, q), q**-0.5 * into_residual)
    for name, width in zip("qk", family.norm_widths(sizes) or (), strict=False):
        yield TensorSpec(f"{prefix}.self_attn.{name}_norm.weight", (width,), None)
    yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (d,), None)
    yield TensorSpec(f"{prefix}.{family.moe}.gate.weight", (sizes.num_experts, d), d**-0.5)
    gate, up, down = family.expert_parts
    for expert in range(sizes.num_experts):
        base = f"{prefix}.{family.moe}.experts.{expert}"
        yield TensorSpec(f"{base}.{gate}.weight", (f, d), d**-0.5)
        yield TensorSpec(f"{base}.{up}.weight", (f, d), d**-0.5)
        yield TensorSpec(f"{base}.{down}.weight", (d, f), f**-0.5 * into_residual)
