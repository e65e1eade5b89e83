"""Llama 4: rotated layers see a chunk, the others everything; one routed and one shared expert."""

from __future__ import annotations

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
    decoder_basics,
    grouped_attention,
    head_dim_of,
    layer_types,
)
from moe_serve.model.rope import RopeSpec
from moe_serve.model.spec import (
    LayerSpec,
    ModelSpec,
    QueryTemperature,
    RouterSpec,
    SharedExpertSpec,
)

_FEED = "model.layers.{layer}.feed_forward."


def _read_spec(config: HFConfig) -> ModelSpec:
    config.require("hidden_act", "silu", default="silu")
    basics = decoder_basics(config, norm_eps=1e-5)
    rope = read_rope(config, head_dim=head_dim_of(config), theta=500_000.0, is_interleaved=True)
    width = config.positive_int("intermediate_size")
    has_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        **basics,
        family="llama4",
        layers=_layers(config, rope, basics["norm_eps"]),
        expert_width=width,
        dense_width=config.positive_int("intermediate_size_mlp", default=width),
        shared=SharedExpertSpec(width=width),
        has_attention_bias=has_bias,
        has_output_bias=has_bias,
        router=RouterSpec(
            shape=RouterShape(
                num_experts=config.positive_int("num_local_experts"),
                top_k=config.positive_int("num_experts_per_tok", default=1),
                is_renormalised=False,
                scoring="sigmoid",
            ),
            is_weighing_inputs=True,
        ),
        rope=rope,
        query_temperature=_query_temperature(config),
    )


def _layers(config: HFConfig, rope: RopeSpec, norm_eps: float) -> tuple[LayerSpec, ...]:
    rotated = _rotated_layers(config)
    sparse = _sparse_layers(config)
    kinds = layer_types(
        config,
        ("chunked_attention", "full_attention"),
        lambda layer: "chunked_attention" if rotated[layer] else "full_attention",
    )
    chunk = config.get("attention_chunk_size", 8192)

    def layer_spec(kind: str, is_rotated: bool, is_sparse: bool) -> LayerSpec:
        """Returns a layer's spec. Only rotated layers norm queries and keys."""
        has_norm = is_rotated and bool(config.get("use_qk_norm", True))
        is_chunked = kind == "chunked_attention" and chunk is not None
        attention = grouped_attention(
            config,
            rope,
            chunk=config.positive_int("attention_chunk_size", default=8192) if is_chunked else None,
            qk_norm="head" if has_norm else "none",
            is_norm_after_rotation=has_norm,
            norm_eps=norm_eps,
        )
        return LayerSpec(attention=attention, has_rotation=is_rotated, is_sparse=is_sparse)

    return tuple(layer_spec(*parts) for parts in zip(kinds, rotated, sparse, strict=True))


def _rotated_layers(config: HFConfig) -> tuple[bool, ...]:
    """Reads `no_rope_layers`, which has a 1 for each layer that IS rotated."""
    num_layers = config.positive_int("num_hidden_layers")
    flags = config.get("no_rope_layers")
    if not flags:
        interval = config.positive_int("no_rope_layer_interval", default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(flags, list) or len(flags) < num_layers:
        raise config.error("no_rope_layers", f"must have one entry for each of {num_layers} layers")
    return tuple(bool(flag) for flag in flags[:num_layers])


def _sparse_layers(config: HFConfig) -> tuple[bool, ...]:
    """Reads `moe_layers`, or takes every `interleave_moe_layer_step`-th layer."""
    layers = range(config.positive_int("num_hidden_layers"))
    if config.get("moe_layers") is not None:
        listed = config.whole_numbers("moe_layers")
        return tuple(layer in listed for layer in layers)
    step = config.positive_int("interleave_moe_layer_step", default=1)
    return tuple((layer + 1) % step == 0 for layer in layers)


def _query_temperature(config: HFConfig) -> QueryTemperature | None:
    if not config.get("attn_temperature_tuning", True):
        return None
    return QueryTemperature(
        scale=config.number("attn_scale", 0.1), floor_scale=config.number("floor_scale", 8192)
    )


FAMILY = Family(
    name="llama4",
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    read_spec=_read_spec,
    names=TensorNames(
        q_norm="",  # a norm without weights
        k_norm="",
        router=_FEED + "router.weight",
        shared=mlp_names(_FEED + "shared_expert."),
        dense=mlp_names(_FEED),
        experts=(
            ExpertNames(
                gate_up=_FEED + "experts.gate_up_proj",
                down=_FEED + "experts.down_proj",
                is_transposed=True,
            ),
            separate_experts(_FEED + "experts."),  # as written by some quantisation tools
        ),
    ),
    prefixes=("", "language_model."),
)
