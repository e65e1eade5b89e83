"""Which layers see a sliding window, as configs list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_kernels.attention_shape import AttentionShape
from moe_serve.model.hf_config import HFConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"


def attention_of_layers(
    config: HFConfig, attention: AttentionShape, default: Sequence[str]
) -> tuple[AttentionShape, ...]:
    """`attention` for each layer, with `sliding_window` where `layer_types` says so.

    `default`: the layer types of a config that lists none (see `sliding_where`).
    """
    types = config.get("layer_types") or default
    num_layers = config.positive_int("num_hidden_layers")
    if not isinstance(types, Sequence) or len(types) < num_layers:
        raise config.error("layer_types", f"must list {num_layers} layers, is {types!r}")
    for layer_type in types:
        if layer_type not in (_FULL, _SLIDING):
            raise config.error(
                "layer_types", f"names {layer_type!r}; supported are {_FULL}, {_SLIDING}"
            )
    if _SLIDING not in types[:num_layers]:
        return (attention,) * num_layers
    sliding = replace(attention, sliding_window=config.positive_int("sliding_window"))
    return tuple(sliding if kind == _SLIDING else attention for kind in types[:num_layers])


def sliding_where(is_sliding: Sequence[bool]) -> tuple[str, ...]:
    """Layer types from one flag per layer."""
    return tuple(_SLIDING if flag else _FULL for flag in is_sliding)
