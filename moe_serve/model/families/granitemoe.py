"""Granite-MoE: scaled embeddings, residuals and logits, a stated softmax scale, fused experts."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import ExpertNames, MLPNames, TensorNames
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    layer_types,
    plain_router,
)
from moe_serve.model.spec import LayerSpec, ModelSpec, SharedExpertSpec

_LAYER = "model.layers.{layer}."
_MOE = _LAYER + "block_sparse_moe."
_HYBRID = "GraniteMoeHybridForCausalLM"


def _read_spec(config: HFConfig) -> ModelSpec:
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(
        config, rope, softmax_scale=config.number("attention_multiplier", 1.0)
    )
    shared_width = _shared_width(config)
    layer = LayerSpec(attention=attention, has_rotation=_has_rotation(config))
    return decoder(
        config,
        norm_eps=1e-6,
        family="granitemoe",
        layers=(layer,) * config.positive_int("num_hidden_layers"),
        expert_width=config.positive_int("intermediate_size"),
        shared=SharedExpertSpec(width=shared_width) if shared_width else None,
        router=plain_router(config, is_renormalised=True, keys=("num_local_experts",)),
        rope=rope,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


def _has_rotation(config: HFConfig) -> bool:
    """Returns whether positions are rotated.

    Granite 4 rotates only if its config says so; its Mamba layers are refused.
    """
    if config.architecture() != _HYBRID:
        return True
    layer_types(config, ("attention", "full_attention"))
    return bool(config.get("position_embedding_type") == "rope")


def _shared_width(config: HFConfig) -> int:
    """Returns the shared expert's width; 0 without a shared expert."""
    if config.architecture() == _HYBRID or config.get("shared_intermediate_size"):
        return config.positive_int("shared_intermediate_size")
    return 0


FAMILY = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", _HYBRID),
    read_spec=_read_spec,
    names=TensorNames(
        router=_MOE + "router.layer.weight",
        shared=MLPNames(
            gate_up=_LAYER + "shared_mlp.input_linear.weight",
            down=_LAYER + "shared_mlp.output_linear.weight",
        ),
        experts=(
            ExpertNames(gate_up=_MOE + "input_linear.weight", down=_MOE + "output_linear.weight"),
            ExpertNames(  # as `moe-serve quantize` stores them
                gate=_MOE + "experts.{expert}.w1.weight",
                up=_MOE + "experts.{expert}.w3.weight",
                down=_MOE + "experts.{expert}.w2.weight",
            ),
        ),
    ),
)
