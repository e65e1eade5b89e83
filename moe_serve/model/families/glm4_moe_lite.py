"""GLM-4.7-Flash: DeepSeek-V3's attention and router, with one dense layer before the others."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.common import sparse_layers
from moe_serve.model.families.family import Family
from moe_serve.model.families.latent import latent_decoder
from moe_serve.model.families.router import biased_sigmoid_router
from moe_serve.model.spec import ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    return latent_decoder(
        config,
        family="glm4_moe_lite",
        router=biased_sigmoid_router(config, scaling=1.8),
        is_sparse=sparse_layers(config, num_dense=1),
        norm_eps=1e-5,
    )


FAMILY = Family(
    name="glm4_moe_lite", architectures=("Glm4MoeLiteForCausalLM",), read_spec=_read_spec
)
