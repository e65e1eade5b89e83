"""Config readers shared by nearly all families."""

from __future__ import annotations

from typing import Any

from moe_kernels.interface.attention_shape import AttentionShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.rope import RopeSpec
from moe_serve.model.spec import SharedExpertSpec


def decoder_basics(config: HFConfig, *, norm_eps: float) -> dict[str, Any]:
    """Return the fields of ModelSpec that all families read alike; `norm_eps` is the family's
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


def head_dim_of(config: HFConfig) -> int:
    """Return the stated head width, or the model width divided by the number of heads."""
    split = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    return config.positive_int("head_dim", default=max(split, 1))


def grouped_attention(config: HFConfig, rope: RopeSpec, **more: Any) -> AttentionShape:
    """Return grouped-query attention from the common keys; `more` holds the family's additions."""
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
    """Refuse a checkpoint that turns on any of `keys`, whose features are not supported."""
    for key in keys:
        if config.get(key):
            raise config.error(key, f"is {config.get(key)!r}; only off is supported")


def sparse_layers(config: HFConfig, *, num_dense: int = 0) -> tuple[bool, ...]:
    """Read `mlp_layer_types`, or every `moe_layer_freq`-th layer after `first_k_dense_replace`."""
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
    """Return the shared expert; several are stored as one, as wide as all of them."""
    if not config.get("n_shared_experts"):
        return None
    num_shared = config.positive_int("n_shared_experts")
    return SharedExpertSpec(width=num_shared * config.positive_int("moe_intermediate_size"))
