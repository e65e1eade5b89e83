"""GLM's families: GLM-4.5-MoE, GLM-4.5V and GLM-4.7-Flash; and Solar Open, which is built alike.

GLM-4.5V contains such a model beside a vision tower; only the text model is served. Text has the
same position in all three rotary dimensions, which is plain rotation. The layer numbered
`num_hidden_layers` predicts a further token.
"""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.config_parts import (
    Family,
    biased_sigmoid_router,
    decoder,
    grouped_attention,
    head_dim_of,
    mixed_layers,
    require_off,
    shared_expert,
    sparse_layers,
)
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.families.mtp import mtp_behind_last_layer
from moe_serve.model.spec import ModelSpec


def glm_decoder(
    config: HFConfig,
    *,
    family: str,
    theta: float = 10_000.0,
    share: float = 0.5,
    num_dense: int = 1,
    has_bias: bool = False,
) -> ModelSpec:
    """Reads a GLM decoder.

    The keywords are the family's defaults for keys that the config may state.
    """
    norm_eps = config.number("rms_norm_eps", 1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config), theta=theta, share=share)
    attention = grouped_attention(
        config,
        rope,
        qk_norm="head" if config.get("use_qk_norm", False) else "none",
        norm_eps=norm_eps,
    )
    return decoder(
        config,
        norm_eps=norm_eps,
        family=family,
        layers=mixed_layers(attention, sparse_layers(config, num_dense=num_dense)),
        shared=shared_expert(config),
        has_attention_bias=bool(config.get("attention_bias", has_bias)),
        has_bias=False,
        router=biased_sigmoid_router(config, scaling=1.0),
        rope=rope,
    )


def _read_glm4_moe(config: HFConfig) -> ModelSpec:
    """GLM-4.5: half of each head is rotated; a sigmoid router with groups, and shared experts."""
    return glm_decoder(config, family="glm4_moe")


def _read_glm4v_moe(config: HFConfig) -> ModelSpec:
    """GLM-4.5V: half of each head is rotated; a sigmoid router with groups, and shared experts."""
    config.require("use_qk_norm", False, default=False)
    return glm_decoder(config, family="glm4v_moe", has_bias=True)


GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    read_spec=_read_glm4_moe,
    read_mtp=mtp_behind_last_layer,
)
GLM4V_MOE = Family(
    name="glm4v_moe",
    architectures=("Glm4vMoeForConditionalGeneration",),
    read_spec=_read_glm4v_moe,
    names=TensorNames().under("model.language_model."),
)


def _read_glm4_moe_lite(config: HFConfig) -> ModelSpec:
    """GLM-4.7: DeepSeek-V3's attention and router, with one dense layer before the others."""
    return latent_decoder(
        config,
        family="glm4_moe_lite",
        router=biased_sigmoid_router(config, scaling=1.8),
        is_sparse=sparse_layers(config, num_dense=1),
        norm_eps=1e-5,
    )


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    read_spec=_read_glm4_moe_lite,
    read_mtp=mtp_behind_last_layer,
)


def _read_solar_open(config: HFConfig) -> ModelSpec:
    """Solar Open: GLM-4.5-MoE without dense layers and q/k norms; whole heads are rotated."""
    require_off(config, "first_k_dense_replace", "use_qk_norm")
    return glm_decoder(config, family="solar_open", theta=1_000_000.0, share=1.0, num_dense=0)


SOLAR_OPEN = Family(
    name="solar_open", architectures=("SolarOpenForCausalLM",), read_spec=_read_solar_open
)
