"""DeepSeek-V3, V3.1 and R1, Kimi-K2, Moonlight: latent attention, sigmoid router with a bias.

Kimi-K2.5, its successors and Kimi-VL contain such a model beside a vision tower; only the text
model is served. Multi-token-prediction layers, stored after the last layer, are not read.
"""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.common import sparse_layers
from moe_serve.model.families.family import Family
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.families.router import biased_sigmoid_router
from moe_serve.model.spec import ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("mlp_bias", False, default=False)
    return latent_decoder(
        config,
        family="deepseek_v3",
        router=biased_sigmoid_router(config, scaling=2.5),
        is_sparse=sparse_layers(config, num_dense=3),
    )


FAMILY = Family(
    name="deepseek_v3",
    architectures=(
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    ),
    read_spec=_read_spec,
    prefixes=("", "language_model."),
)
