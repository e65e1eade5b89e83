"""Qwen2-MoE and Qwen1.5-MoE: biases of q, k and v, and a shared expert behind a sigmoid gate."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames, mlp_names
from moe_serve.model.families.common import decoder_basics, grouped_attention, head_dim_of
from moe_serve.model.families.family import Family
from moe_serve.model.families.qwen3_moe import sparse_layers
from moe_serve.model.families.windows import windowed_layers
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec, SharedExpertSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    rope = read_rope(config, head_dim=head_dim_of(config))
    last = config.number("max_window_layers", 28) if config.get("use_sliding_window") else 0
    attention = windowed_layers(  # every other one of the first layers, if windows are used at all
        config, grouped_attention(config, rope), lambda layer: layer % 2 == 0 and layer < last
    )
    return ModelSpec(
        **decoder_basics(config, norm_eps=1e-6),
        family="qwen2_moe",
        layers=tuple(
            LayerSpec(attention=shape, is_sparse=is_sparse)
            for shape, is_sparse in zip(attention, sparse_layers(config), strict=True)
        ),
        expert_width=config.positive_int("moe_intermediate_size"),
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=SharedExpertSpec(
            width=config.positive_int("shared_expert_intermediate_size"), has_gate=True
        ),
        has_attention_bias=bool(config.get("qkv_bias", True)),
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("num_experts", "num_local_experts"),
                top_k=config.positive_int("num_experts_per_tok"),
                is_renormalised=bool(config.get("norm_topk_prob", False)),
            )
        ),
        rope=rope,
    )


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(shared=mlp_names("model.layers.{layer}.mlp.shared_expert.")),
)
