"""GPT-OSS: attention sinks, every other layer a window, biases everywhere, clamped SwiGLU."""

from __future__ import annotations

from moe_kernels.interface.kernels import GatedActivation
from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import ExpertNames, TensorNames
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    windowed_layers,
)
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec

_MLP = "model.layers.{layer}.mlp."


def _read_spec(config: HFConfig) -> ModelSpec:
    rope = read_rope(config, head_dim=head_dim_of(config), theta=150_000.0)
    attention = grouped_attention(config, rope, has_sinks=True)
    has_bias = bool(config.get("attention_bias", True))
    return decoder(
        config,
        norm_eps=1e-5,
        family="gpt_oss",
        layers=tuple(
            LayerSpec(attention=of_layer)
            for of_layer in windowed_layers(config, attention, lambda layer: layer % 2 == 0)
        ),
        expert_width=config.positive_int("intermediate_size"),
        activation=GatedActivation(
            alpha=config.number("swiglu_alpha", 1.702),
            limit=config.number("swiglu_limit", 7.0),
            up_offset=1.0,
        ),
        has_expert_bias=True,
        has_bias=has_bias,
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("num_local_experts", "num_experts"),
                top_k=config.positive_int("num_experts_per_tok", "experts_per_token"),
                is_renormalised=True,
            ),
            has_bias=True,
        ),
        rope=rope,
    )


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        router=_MLP + "router.weight",
        router_bias=_MLP + "router.bias",
        experts=(
            ExpertNames(
                gate_up=_MLP + "experts.gate_up_proj",
                gate_up_bias=_MLP + "experts.gate_up_proj_bias",
                down=_MLP + "experts.down_proj",
                down_bias=_MLP + "experts.down_proj_bias",
                is_transposed=True,
                is_interleaved=True,
            ),
        ),
    ),
)
