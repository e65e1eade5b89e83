"""Readers for models with multi-head latent attention (MLA), whose configs use DeepSeek's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_kernels.interface.attention_shape import LatentShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope, rope_values, yarn_softmax_factor
from moe_serve.model.families.config_parts import decoder_basics, shared_expert
from moe_serve.model.rope import RopeSpec
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec

_LATENT_NORM_EPS = 1e-6  # fixed: the latents' norms never follow rms_norm_eps


def latent_decoder(
    config: HFConfig,
    *,
    family: str,
    router: RouterSpec,
    is_sparse: Sequence[bool],
    norm_eps: float = 1e-6,
    **more: Any,
) -> ModelSpec:
    """Reads a decoder with latent attention; `more` holds the family's additions and overrides."""
    config.require("hidden_act", "silu", default="silu")
    latent = latent_shape(config)
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **decoder_basics(config, norm_eps=norm_eps),
        **{
            "family": family,
            "layers": tuple(
                LayerSpec(attention=latent.absorbed(), is_sparse=each) for each in is_sparse
            ),
            "expert_width": config.positive_int("moe_intermediate_size"),
            "dense_width": config.positive_int("intermediate_size"),
            "shared": shared_expert(config),
            "latent": latent,
            "has_attention_bias": has_bias,
            "has_output_bias": has_bias,
            "router": router,
            "rope": latent_rope(config, latent),
            **more,
        },
    )


def latent_shape(config: HFConfig) -> LatentShape:
    """Reads the latent attention's shape.

    Every head has its own key, so the number of key/value heads is fixed.
    """
    config.require("use_mla", True, default=True)
    config.require("index_topk", None, default=None)  # sparse attention
    num_heads = config.positive_int("num_attention_heads")
    num_kv_heads = config.positive_int("num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise config.error(
            "num_key_value_heads",
            f"is {num_kv_heads}; latent attention has as many as num_attention_heads ({num_heads})",
        )
    nope_dim = config.positive_int("qk_nope_head_dim")
    rope_dim = config.positive_int("qk_rope_head_dim")
    has_rank = config.get("q_lora_rank") is not None
    return LatentShape(
        num_heads=num_heads,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.positive_int("v_head_dim"),
        latent_dim=config.positive_int("kv_lora_rank"),
        query_rank=config.positive_int("q_lora_rank") if has_rank else None,
        norm_eps=_LATENT_NORM_EPS,
        softmax_scale=float((nope_dim + rope_dim) ** -0.5) * yarn_softmax_factor(config),
    )


def latent_rope(config: HFConfig, latent: LatentShape) -> RopeSpec:
    """Reads the rope of latent attention; the whole rotary part is rotated.

    The rotary part is all of it, or its share of a whole head if the config states a
    `partial_rotary_factor`.
    """
    share = rope_values(config).get("partial_rotary_factor") or config.get("partial_rotary_factor")
    is_share_of_head = share is not None and share != 1.0
    rope = read_rope(
        config,
        head_dim=latent.rope_dim + (latent.nope_dim if is_share_of_head else 0),
        is_interleaved=bool(config.get("rope_interleave", True)),
    )
    if rope.dim != latent.rope_dim:
        raise config.error(
            "partial_rotary_factor",
            f"is {share!r}, which does not give qk_rope_head_dim ({latent.rope_dim})",
        )
    return rope
