"""`layer_types`: which kind of attention each layer has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moe_serve.model.checkpoint.hf_config import HFConfig


def layer_types(
    config: HFConfig, served: Sequence[str], default: Callable[[int], str] | None = None
) -> tuple[str, ...]:
    """One of `served` for each layer; where the config has no list, what `default(layer)` says."""
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
