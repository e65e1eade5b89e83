"""Qwen's families: Qwen2-MoE and Qwen1.5-MoE, Qwen3-MoE, and the text model of Qwen3-VL-MoE.

Text has the same position in all three rotary dimensions of Qwen3-VL, which is plain rotation.
"""

from __future__ import annotations

from dataclasses import replace

from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.checkpoint.tensor_names import (
    ExpertNames,
    TensorNames,
    mlp_names,
    separate_experts,
)
from moe_serve.model.families.config_parts import (
    Family,
    decoder,
    grouped_attention,
    head_dim_of,
    mixed_layers,
    plain_router,
    windowed_layers,
)
from moe_serve.model.spec import ModelSpec, SharedExpertSpec

_EXPERTS = "model.layers.{layer}.mlp.experts."


def qwen_sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Returns which layers have experts: every `decoder_sparse_step`-th,
    except `mlp_only_layers`.
    """
    step = config.positive_int("decoder_sparse_step", default=1)
    dense = config.whole_numbers("mlp_only_layers")
    layers = range(config.positive_int("num_hidden_layers"))
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers)


def _read_qwen3_moe(config: HFConfig) -> ModelSpec:
    """Qwen3-MoE: grouped-query attention with q/k norm over each head, softmax router."""
    config.require("use_sliding_window", False, default=False)
    norm_eps = config.number("rms_norm_eps", 1e-6)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=norm_eps)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="qwen3_moe",
        layers=mixed_layers(attention, qwen_sparse_layers(config)),
        router=plain_router(config, is_renormalised=bool(config.get("norm_topk_prob", False))),
        rope=rope,
    )


QWEN3_MOE = Family(
    name="qwen3_moe", architectures=("Qwen3MoeForCausalLM",), read_spec=_read_qwen3_moe
)


def _read_qwen2_moe(config: HFConfig) -> ModelSpec:
    """Qwen2-MoE: biases of q, k and v, and a shared expert behind a sigmoid gate."""
    rope = read_rope(config, head_dim=head_dim_of(config))
    last = config.number("max_window_layers", 28) if config.get("use_sliding_window") else 0
    attention = windowed_layers(  # every other one of the first layers, if windows are used at all
        config, grouped_attention(config, rope), lambda layer: layer % 2 == 0 and layer < last
    )
    return decoder(
        config,
        norm_eps=1e-6,
        family="qwen2_moe",
        layers=mixed_layers(attention, qwen_sparse_layers(config)),
        shared=SharedExpertSpec(
            width=config.positive_int("shared_expert_intermediate_size"), has_gate=True
        ),
        has_attention_bias=bool(config.get("qkv_bias", True)),
        has_bias=False,
        router=plain_router(config, is_renormalised=bool(config.get("norm_topk_prob", False))),
        rope=rope,
    )


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    read_spec=_read_qwen2_moe,
    names=TensorNames(shared=mlp_names("model.layers.{layer}.mlp.shared_expert.")),
)


def _read_qwen3_vl_moe(config: HFConfig) -> ModelSpec:
    """Qwen3-VL: the text model of Qwen3-MoE inside a larger one; images are not read."""
    config.require("norm_topk_prob", True, default=True)
    spec = _read_qwen3_moe(config)
    shape: RouterShape = replace(spec.router.shape, is_renormalised=True)
    return replace(spec, family="qwen3_vl_moe", router=replace(spec.router, shape=shape))


QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    read_spec=_read_qwen3_vl_moe,
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
