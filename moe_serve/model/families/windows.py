"""Layers with a sliding window among layers that see everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_kernels.interface.attention_shape import AttentionShape
from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.families.layer_types import layer_types

FULL, SLIDING = "full_attention", "sliding_attention"


def windowed_layers(
    config: HFConfig, attention: AttentionShape, is_sliding: Callable[[int], bool]
) -> tuple[AttentionShape, ...]:
    """Return `attention` for each layer, with `sliding_window` in those that `layer_types` marks.

    Without such a list in the config, `is_sliding` marks them.
    """
    kinds = layer_types(config, (FULL, SLIDING), lambda i: SLIDING if is_sliding(i) else FULL)
    if SLIDING not in kinds:
        return (attention,) * len(kinds)
    sliding = replace(attention, sliding_window=config.positive_int("sliding_window"))
    return tuple(sliding if kind == SLIDING else attention for kind in kinds)
