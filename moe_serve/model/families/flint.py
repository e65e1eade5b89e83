"""Flint: sinks, windows in most layers and no positions in the others, a sigmoid router."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames, mlp_names
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    plain_router,
    windowed_layers,
)
from moe_serve.model.families.qwen import qwen_sparse_layers
from moe_serve.model.spec import LayerSpec, ModelSpec, SharedExpertSpec

_LAYER = "model.layers.{layer}."


def _read_spec(config: HFConfig) -> ModelSpec:
    norm_eps = config.number("rms_norm_eps", 1e-6)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=norm_eps, has_sinks=True)
    last = config.positive_int("num_hidden_layers") - 1
    windows = windowed_layers(config, attention, lambda i: i > 1 and i % 4 != 1 and i != last)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="flint",
        layers=tuple(
            LayerSpec(
                attention=shape,
                is_sparse=is_sparse,
                has_rotation=shape.sliding_window is not None,
            )
            for shape, is_sparse in zip(windows, qwen_sparse_layers(config), strict=True)
        ),
        shared=SharedExpertSpec(width=config.positive_int("shared_expert_intermediate_size")),
        router=plain_router(
            config, is_renormalised=bool(config.get("norm_topk_prob", True)), scoring="sigmoid"
        ),
        rope=rope,
    )


FAMILY = Family(
    name="flint",
    architectures=("FlintForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        sinks=_LAYER + "self_attn.softmax_offset",
        shared=mlp_names(_LAYER + "mlp.shared_expert."),
    ),
)
