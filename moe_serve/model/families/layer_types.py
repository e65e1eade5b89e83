"""`layer_types`: which kind of attention each layer has, as configs list it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_kernels.attention_shape import AttentionShape
from moe_serve.model.hf_config import HFConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"


def layer_types(
    config: HFConfig, served: Sequence[str], default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """One of `served` for each layer; `default` stands for a list that the config lacks."""
    kinds = config.get("layer_types") or default
    num_layers = config.positive_int("num_hidden_layers")
    if not isinstance(kinds, Sequence) or len(kinds) < num_layers:
        raise config.error("layer_types", f"must list {num_layers} layers, is {kinds!r}")
    for kind in kinds:
        if kind not in served:
            raise config.error("layer_types", f"names {kind!r}; supported are {', '.join(served)}")
    return tuple(kinds[:num_layers])


def attention_of_layers(
    config: HFConfig, attention: AttentionShape, default: Sequence[str]
) -> tuple[AttentionShape, ...]:
    """`attention` for each layer, with `sliding_window` where `layer_types` says so.

    `default`: the layer types of a config that lists none (see `sliding_where`).
    """
    kinds = layer_types(config, (_FULL, _SLIDING), default)
    if _SLIDING not in kinds:
        return (attention,) * len(kinds)
    sliding = replace(attention, sliding_window=config.positive_int("sliding_window"))
    return tuple(sliding if kind == _SLIDING else attention for kind in kinds)


def sliding_where(is_sliding: Sequence[bool]) -> tuple[str, ...]:
    """Layer types from one flag per layer."""
    return tuple(_SLIDING if flag else _FULL for flag in is_sliding)
