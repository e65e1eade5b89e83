"""Reads `layer_types`: the kind of attention of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_serve.model.checkpoint.hf_config import HFConfig


def layer_types(
    config: HFConfig, served: Sequence[str], default: Callable[[int], str] | None = None
) -> tuple[str, ...]:
    """Return one of `served` for each layer; without a list in the config, `default(layer)`."""
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
