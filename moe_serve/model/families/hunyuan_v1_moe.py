"""Hunyuan-A13B: q/k norm after the rotation, a stretched rotary base, a shared expert."""

from __future__ import annotations

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames, mlp_names
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    require_off,
)
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec, SharedExpertSpec

_LAYER = "model.layers.{layer}."


def _read_spec(config: HFConfig) -> ModelSpec:
    _refuse_unserved(config)
    norm_eps = config.number("rms_norm_eps", 1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(
        config,
        rope,
        qk_norm="head" if config.get("use_qk_norm", True) else "none",
        is_norm_after_rotation=True,
        norm_eps=norm_eps,
    )
    return decoder(
        config,
        norm_eps=norm_eps,
        family="hunyuan_v1_moe",
        layers=(LayerSpec(attention=attention),) * config.positive_int("num_hidden_layers"),
        expert_width=_same_in_all(
            config, "moe_intermediate_size", config.positive_int("intermediate_size")
        ),
        shared=_shared(config),
        router=RouterSpec(
            shape=RouterShape(
                num_experts=_same_in_all(config, "num_experts"),
                top_k=_same_in_all(config, "moe_topk"),
                is_renormalised=True,
            )
        ),
        rope=rope,
    )


def _shared(config: HFConfig) -> SharedExpertSpec | None:
    if not config.get("use_mixed_mlp_moe", True):
        return None
    num_shared = _same_in_all(config, "num_shared_expert", 1)
    return SharedExpertSpec(width=num_shared * config.positive_int("intermediate_size"))


def _same_in_all(config: HFConfig, key: str, default: int | None = None) -> int:
    """Reads a number, or a list with one number per layer, which must all be equal."""
    value = config.get(key)
    if not isinstance(value, list):
        return config.positive_int(key, default=default)
    if not value or any(part != value[0] for part in value):
        raise config.error(key, f"must be the same in all layers, is {value!r}")
    return HFConfig({key: value[0]}, config.source).positive_int(key)


def _refuse_unserved(config: HFConfig) -> None:
    """Refuses keys of Hunyuan's other models."""
    config.require("norm_topk_prob", True, default=True)
    config.require("norm_type", "rms", default="rms")
    require_off(
        config,
        "use_cla",
        "use_mla",
        "mlp_bias",
        "position_embedding_xdrope",
        "moe_layer_num_skipped",
        "group_limited_greedy",
        "routed_scaling_factor",
    )


FAMILY = Family(
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM",),
    read_spec=_read_spec,
    names=TensorNames(
        q_norm=_LAYER + "self_attn.query_layernorm.weight",
        k_norm=_LAYER + "self_attn.key_layernorm.weight",
        router=_LAYER + "mlp.gate.wg.weight",
        shared=mlp_names(_LAYER + "mlp.shared_mlp."),
    ),
)
