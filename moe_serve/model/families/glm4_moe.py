"""GLM-4.5-MoE: half of each head is rotated; a sigmoid router with groups, and shared experts.

GLM-4.5V contains such a model beside a vision tower; only the text model is served. Text has the
same position in all three rotary dimensions, which is plain rotation. Layers beyond
`num_hidden_layers` predict further tokens; they are not read.
"""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.common import (
    decoder_basics,
    grouped_attention,
    head_dim_of,
    shared_expert,
    sparse_layers,
)
from moe_serve.model.families.family import Family
from moe_serve.model.families.router import biased_sigmoid_router
from moe_serve.model.spec import LayerSpec, ModelSpec


def glm_decoder(
    config: HFConfig,
    *,
    family: str,
    theta: float = 10_000.0,
    share: float = 0.5,
    num_dense: int = 1,
    has_bias: bool = False,
) -> ModelSpec:
    """Read a GLM decoder.

    The keywords are the family's defaults for keys that the config may state.
    """
    config.require("hidden_act", "silu", default="silu")
    basics = decoder_basics(config, norm_eps=1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config), theta=theta, share=share)
    attention = grouped_attention(
        config,
        rope,
        qk_norm="head" if config.get("use_qk_norm", False) else "none",
        norm_eps=basics["norm_eps"],
    )
    return ModelSpec(
        **basics,
        family=family,
        layers=tuple(
            LayerSpec(attention=attention, is_sparse=is_sparse)
            for is_sparse in sparse_layers(config, num_dense=num_dense)
        ),
        expert_width=config.positive_int("moe_intermediate_size"),
        dense_width=config.positive_int("intermediate_size", default=1),
        shared=shared_expert(config),
        has_attention_bias=bool(config.get("attention_bias", has_bias)),
        router=biased_sigmoid_router(config, scaling=1.0),
        rope=rope,
    )


def _read_spec(config: HFConfig) -> ModelSpec:
    return glm_decoder(config, family="glm4_moe")


def _read_text_spec(config: HFConfig) -> ModelSpec:
    config.require("use_qk_norm", False, default=False)
    return glm_decoder(config, family="glm4v_moe", has_bias=True)


FAMILY = Family(name="glm4_moe", architectures=("Glm4MoeForCausalLM",), read_spec=_read_spec)
WITH_VISION = Family(
    name="glm4v_moe",
    architectures=("Glm4vMoeForConditionalGeneration",),
    read_spec=_read_text_spec,
    names=TensorNames().under("model.language_model."),
)
