"""Solar Open: GLM-4.5-MoE without dense layers and q/k norms; whole heads are rotated."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.common import require_off
from moe_serve.model.families.family import Family
from moe_serve.model.families.glm4_moe import glm_decoder
from moe_serve.model.spec import ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    require_off(config, "first_k_dense_replace", "use_qk_norm")
    return glm_decoder(config, family="solar_open", theta=1_000_000.0, share=1.0, num_dense=0)


FAMILY = Family(name="solar_open", architectures=("SolarOpenForCausalLM",), read_spec=_read_spec)
