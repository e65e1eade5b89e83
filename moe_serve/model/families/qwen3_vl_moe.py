"""Qwen3-VL-MoE: the text model of Qwen3-MoE inside a larger one; images are not read.

Text has the same position in all three of its rotary dimensions, which is plain rotation.
"""

from __future__ import annotations

from dataclasses import replace

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.tensor_names import ExpertNames, TensorNames, separate_experts
from moe_serve.model.families.family import Family
from moe_serve.model.families.qwen3_moe import read_spec
from moe_serve.model.spec import ModelSpec

_EXPERTS = "model.layers.{layer}.mlp.experts."


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("norm_topk_prob", True, default=True)
    spec = read_spec(config)
    shape: RouterShape = replace(spec.router.shape, is_renormalised=True)
    return replace(spec, family="qwen3_vl_moe", router=replace(spec.router, shape=shape))


FAMILY = Family(
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    read_spec=_read_spec,
    names=TensorNames(
        experts=(
            *(  # transposed as published, but not as transformers 5 writes them
                ExpertNames(
                    gate_up=_EXPERTS + "gate_up_proj",
                    down=_EXPERTS + "down_proj",
                    is_transposed=is_transposed,
                )
                for is_transposed in (True, False)
            ),
            separate_experts(_EXPERTS),  # as written by some quantisation tools
        )
    ).under("model.language_model."),
)
