"""Defines the declaration of a family, and readers of config keys that several families share:
widths, attention, layers, windows, routers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moe_kernels.interface.attention_shape import AttentionShape
from moe_kernels.interface.routing import RouterShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.tensor_names import TensorNames
from moe_serve.model.families.mtp import ReadMTP
from moe_serve.model.rope import RopeSpec
from moe_serve.model.spec import LayerSpec, ModelSpec, RouterSpec, SharedExpertSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of checkpoints.

    `prefixes`: prefixes that may precede every tensor's name, for a text model inside a larger one;
    the first one under which the embedding is found is used. `read_mtp`: None if MTP layers of its
    checkpoints are not known.
    """

    name: str
    architectures: tuple[str, ...]
    read_spec: Callable[[HFConfig], ModelSpec]
    names: TensorNames = field(default_factory=TensorNames)
    prefixes: tuple[str, ...] = ("",)
    read_mtp: ReadMTP | None = None

    def prefix_in(self, has: Callable[[str], bool]) -> str:
        """Returns the prefix of each name in this checkpoint. `has` says whether a tensor
        exists.
        """
        found = (prefix for prefix in self.prefixes if has(prefix + self.names.embedding))
        return next(found, self.prefixes[0])

    def names_in(self, has: Callable[[str], bool]) -> TensorNames:
        """Returns the names as this checkpoint writes them; `has` tells whether a tensor exists."""
        return self.names.after(self.prefix_in(has))


FULL, SLIDING = "full_attention", "sliding_attention"


def decoder_basics(config: HFConfig, *, norm_eps: float) -> dict[str, Any]:
    """Returns the fields of ModelSpec that all families read alike; `norm_eps` is the family's
    default.
    """
    return {
        "vocab_size": config.positive_int("vocab_size"),
        "width": config.positive_int("hidden_size"),
        "norm_eps": config.number("rms_norm_eps", norm_eps),
        "is_head_tied": bool(config.get("tie_word_embeddings", False)),
        "max_positions": config.positive_int("max_position_embeddings", default=32_768),
        "dtype": config.dtype(),
        "eos_token_ids": config.eos_token_ids(),
    }


def decoder(
    config: HFConfig,
    *,
    family: str,
    layers: Sequence[LayerSpec],
    router: RouterSpec,
    rope: RopeSpec,
    norm_eps: float,
    has_bias: bool | None = None,
    **more: Any,
) -> ModelSpec:
    """Reads a decoder with grouped-query attention; `more` holds the family's additions.

    `has_bias`: of q, k, v and the output; None reads `attention_bias`. A family whose experts are
    as wide as another key says states `expert_width` itself.
    """
    config.require("hidden_act", "silu", default="silu")
    if has_bias is None:
        has_bias = bool(config.get("attention_bias", False))
    fields = decoder_basics(config, norm_eps=norm_eps)
    fields |= {"has_attention_bias": has_bias, "has_output_bias": has_bias}
    if "expert_width" not in more:
        fields["expert_width"] = config.positive_int("moe_intermediate_size")
        fields["dense_width"] = config.positive_int("intermediate_size", default=1)
    return ModelSpec(
        family=family, layers=tuple(layers), router=router, rope=rope, **{**fields, **more}
    )


def mixed_layers(
    attention: AttentionShape | Sequence[AttentionShape], is_sparse: Sequence[bool]
) -> tuple[LayerSpec, ...]:
    """Returns sparse and dense layers, whose attention is the same or listed."""
    shapes = [attention] * len(is_sparse) if isinstance(attention, AttentionShape) else attention
    return tuple(
        LayerSpec(attention=shape, is_sparse=each)
        for shape, each in zip(shapes, is_sparse, strict=True)
    )


def head_dim_of(config: HFConfig) -> int:
    """Returns the stated head width, or the model width divided by the number of heads."""
    split = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    return config.positive_int("head_dim", default=max(split, 1))


def grouped_attention(config: HFConfig, rope: RopeSpec, **more: Any) -> AttentionShape:
    """Returns grouped-query attention from the common keys; `more` holds the family's additions."""
    num_heads = config.positive_int("num_attention_heads")
    head_dim = head_dim_of(config)
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.positive_int("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        rotary_dim=None if rope.dim == head_dim else rope.dim,
        **more,
    )


def require_off(config: HFConfig, *keys: str) -> None:
    """Refuses a checkpoint that turns on any of `keys`, whose features are not supported."""
    for key in keys:
        if config.get(key):
            raise config.error(key, f"is {config.get(key)!r}; only off is supported")


def sparse_layers(config: HFConfig, *, num_dense: int = 0) -> tuple[bool, ...]:
    """Reads `mlp_layer_types`, or every `moe_layer_freq`-th layer after `first_k_dense_replace`."""
    num_layers = config.positive_int("num_hidden_layers")
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise config.error("mlp_layer_types", f"must list {num_layers} layers")
        if unknown := [kind for kind in types if kind not in ("dense", "sparse")]:
            raise config.error("mlp_layer_types", f"may be dense or sparse, not {unknown[0]!r}")
        return tuple(kind == "sparse" for kind in types)
    first = int(config.number("first_k_dense_replace", num_dense))
    step = config.positive_int("moe_layer_freq", default=1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


def shared_expert(config: HFConfig) -> SharedExpertSpec | None:
    """Returns the shared expert; several are stored as one, as wide as all of them."""
    if not config.get("n_shared_experts"):
        return None
    num_shared = config.positive_int("n_shared_experts")
    return SharedExpertSpec(width=num_shared * config.positive_int("moe_intermediate_size"))


def layer_types(
    config: HFConfig, served: Sequence[str], default: Callable[[int], str] | None = None
) -> tuple[str, ...]:
    """Returns one of `served` for each layer; without a list in the config, `default(layer)`."""
    num_layers = config.positive_int("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None and default is not None:
        return tuple(default(layer) for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must name the kind of each of {num_layers} layers")
    for kind in kinds:
        if kind not in served:
            raise config.error("layer_types", f"has {kind!r}; supported are {', '.join(served)}")
    return tuple(kinds)


def windowed_layers(
    config: HFConfig, attention: AttentionShape, is_sliding: Callable[[int], bool]
) -> tuple[AttentionShape, ...]:
    """Returns `attention` for each layer, with `sliding_window` in those that `layer_types` marks.

    Without such a list in the config, `is_sliding` marks them.
    """
    kinds = layer_types(config, (FULL, SLIDING), lambda i: SLIDING if is_sliding(i) else FULL)
    if SLIDING not in kinds:
        return (attention,) * len(kinds)
    sliding = replace(attention, sliding_window=config.positive_int("sliding_window"))
    return tuple(sliding if kind == SLIDING else attention for kind in kinds)


def plain_router(
    config: HFConfig,
    *,
    is_renormalised: bool,
    keys: Sequence[str] = ("num_experts", "num_local_experts"),
    has_selection_bias: bool = False,
    **more: Any,
) -> RouterSpec:
    """Reads a router without groups; the first of `keys` in the config is the number of experts."""
    shape = RouterShape(
        num_experts=config.positive_int(*keys),
        top_k=config.positive_int("num_experts_per_tok"),
        is_renormalised=is_renormalised,
        **more,
    )
    return RouterSpec(shape=shape, has_selection_bias=has_selection_bias)


def biased_sigmoid_router(config: HFConfig, *, scaling: float) -> RouterSpec:
    """Reads DeepSeek-V3's router: a load-balancing bias per expert affects the choice only.

    `scaling` is the family's default of routed_scaling_factor.
    """
    config.one_of("scoring_func", ("sigmoid", "noaux_tc"), "sigmoid")  # dots.llm1's name for it
    config.require("topk_method", "noaux_tc", default="noaux_tc")
    return RouterSpec(
        has_selection_bias=True,
        shape=RouterShape(
            **router_numbers(config, scaling=scaling),
            is_renormalised=bool(config.get("norm_topk_prob", True)),
            renorm_floor=1e-20,
            scoring="sigmoid",
            group_score="top2",
            **expert_groups(config),
        ),
    )


def router_numbers(config: HFConfig, *, scaling: float) -> dict[str, Any]:
    """Returns fields of RouterShape: numbers of experts and choices, and the factor of their
    weights.
    """
    return {
        "num_experts": config.positive_int("n_routed_experts", "num_local_experts", "num_experts"),
        "top_k": config.positive_int("num_experts_per_tok"),
        "scaling": config.number("routed_scaling_factor", scaling),
    }


def expert_groups(config: HFConfig) -> dict[str, Any]:
    """Returns fields of RouterShape: the groups that experts are chosen from."""
    return {
        "num_groups": config.positive_int("n_group", default=1),
        "num_groups_kept": config.positive_int("topk_group", default=1),
    }
