"""Mixtral: plain grouped-query attention (sliding window in early releases), renormalised top-k."""

from __future__ import annotations

from moe_kernels.attention_shape import AttentionShape
from moe_serve.model.families.family import Family
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.spec import ModelSpec, RouterSpec
from moe_serve.model.tensor_names import TensorNames

_MOE = "model.layers.{layer}.block_sparse_moe."


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    width = config.positive_int("hidden_size")
    norm_eps = config.number("rms_norm_eps", 1e-5)
    num_heads = config.positive_int("num_attention_heads")
    window = config.get("sliding_window")
    return ModelSpec(
        family="mixtral",
        vocab_size=config.positive_int("vocab_size"),
        width=width,
        num_layers=config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
        attention=AttentionShape(
            num_heads=num_heads,
            num_kv_heads=config.positive_int("num_key_value_heads", default=num_heads),
            head_dim=config.positive_int("head_dim", default=width // num_heads),
            sliding_window=None if window is None else config.positive_int("sliding_window"),
        ),
        has_attention_bias=False,
        has_output_bias=False,
        router=RouterSpec(
            num_experts=config.positive_int("num_local_experts", "num_experts"),
            top_k=config.positive_int("num_experts_per_tok"),
            is_renormalised=True,
        ),
        rope=config.rope(1_000_000.0),
        norm_eps=norm_eps,
        is_head_tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.positive_int("max_position_embeddings", default=32_768),
        dtype=config.dtype(),
        eos_token_ids=config.eos_token_ids(),
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        router=_MOE + "gate.weight",
        expert_gate=_MOE + "experts.{expert}.w1.weight",
        expert_up=_MOE + "experts.{expert}.w3.weight",
        expert_down=_MOE + "experts.{expert}.w2.weight",
    ),
)
