"""Mixtral: plain grouped-query attention (sliding window in early releases), renormalised top-k."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import ExpertNames, TensorNames
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    plain_router,
)
from moe_serve.model.spec import LayerSpec, ModelSpec

_MOE = "model.layers.{layer}.block_sparse_moe."


def _read_spec(config: HFConfig) -> ModelSpec:
    rope = read_rope(config, head_dim=head_dim_of(config), theta=1_000_000.0)
    window = config.get("sliding_window")
    attention = grouped_attention(
        config,
        rope,
        sliding_window=None if window is None else config.positive_int("sliding_window"),
    )
    return decoder(
        config,
        norm_eps=1e-5,
        family="mixtral",
        layers=(LayerSpec(attention=attention),) * config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
        has_bias=False,
        router=plain_router(
            config, is_renormalised=True, keys=("num_local_experts", "num_experts")
        ),
        rope=rope,
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        router=_MOE + "gate.weight",
        experts=(
            ExpertNames(
                gate=_MOE + "experts.{expert}.w1.weight",
                up=_MOE + "experts.{expert}.w3.weight",
                down=_MOE + "experts.{expert}.w2.weight",
            ),
        ),
    ),
)
