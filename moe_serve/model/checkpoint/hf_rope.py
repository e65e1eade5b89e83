"""Reads rotary positions from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    yarn_magnitude,
)

_LEAST, _MOST = 1e-30, 1e30  # beyond these, powers and logarithms overflow
_SUPPORTED = "default, linear, dynamic, yarn, llama3"


def read_rope(
    config: HFConfig,
    *,
    head_dim: int,
    theta: float = 10_000.0,
    share: float = 1.0,
    is_interleaved: bool = False,
    values: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    `theta` and `share` are the family's defaults. Rotates `partial_rotary_factor` of `head_dim`, or
    that share of it. `values`: read these instead of the config's own (ropes by layer type).
    """
    values = rope_values(config) if values is None else values
    share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or share
    dim = int(head_dim * _number(config, "partial_rotary_factor", share))
    base = _number(config, "rope_theta", values.get("rope_theta") or theta)
    if base <= 1:
        raise config.error("rope_theta", f"must be greater than 1, is {base!r}")
    alpha = values.get("alpha")
    if _kind(values) == "dynamic" and alpha and dim > 2:  # a fixed stretch of the base (NTK-aware)
        base *= _number(config, "rope_scaling.alpha", alpha) ** (dim / (dim - 2))
    return RopeSpec(
        theta=base, dim=dim, scaling=_scaling(config, values), is_interleaved=is_interleaved
    )


def rope_values(config: HFConfig) -> dict[str, Any]:
    """Returns both ways of writing rope settings as one mapping."""
    merged: dict[str, Any] = {}
    if config.get("rope_theta") is not None:
        merged["rope_theta"] = config.get("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        part = config.get(key) or {}
        if not isinstance(part, Mapping):
            raise config.error(key, f"must be an object, is {part!r}")
        merged |= {k: v for k, v in part.items() if v is not None}
    return merged


def yarn_softmax_factor(config: HFConfig) -> float:
    """Returns DeepSeek's factor: the softmax scale grows by the square of YaRN's magnitude for all
    dimensions.
    """
    values = rope_values(config)
    scale = values.get("mscale_all_dim")
    if _kind(values) == "default" or not scale:
        return 1.0
    factor = _number(config, "rope_scaling.factor", values.get("factor", 1.0))
    return yarn_magnitude(factor, _number(config, "rope_scaling.mscale_all_dim", scale)) ** 2


def _kind(values: Mapping[str, Any]) -> str:
    return str(values.get("rope_type") or values.get("type") or "default")


def _scaling(config: HFConfig, values: Mapping[str, Any]) -> RopeScaling | None:
    def number(key: str, default: float | None = None) -> float:
        value = values.get(key, default)
        if value is None:
            raise config.error("rope_scaling", f"of type {_kind(values)!r} lacks {key}")
        return _number(config, f"rope_scaling.{key}", value)

    def original_positions() -> int:
        positions = int(number("original_max_position_embeddings"))
        if positions < 1:
            raise config.error("rope_scaling", "has an original_max_position_embeddings below 1")
        return positions

    match _kind(values):
        case "default":
            return None
        case "dynamic":  # stretches only beyond max_position_embeddings, which is never served
            return None
        case "linear":
            return LinearScaling(factor=number("factor", 1.0))
        case "llama3":
            return Llama3Scaling(
                factor=number("factor"),
                low_frequency_factor=number("low_freq_factor"),
                high_frequency_factor=number("high_freq_factor"),
                original_positions=original_positions(),
            )
        case "yarn":
            original = original_positions()
            factor = number(
                "factor", config.positive_int("max_position_embeddings", default=1) / original
            )
            return YarnScaling(
                factor=factor,
                original_positions=original,
                attention_factor=_yarn_attention_factor(values, factor, number),
                beta_fast=number("beta_fast", 32.0),
                beta_slow=number("beta_slow", 1.0),
                is_truncated=bool(values.get("truncate", True)),
            )
        case kind:
            raise config.error("rope_scaling", f"asks for {kind!r}; supported are {_SUPPORTED}")


def _yarn_attention_factor(values: Mapping[str, Any], factor: float, number: Any) -> float:
    if values.get("attention_factor") is not None:
        return float(number("attention_factor"))
    if values.get("mscale") and values.get("mscale_all_dim"):
        whole = yarn_magnitude(factor, number("mscale_all_dim"))
        return yarn_magnitude(factor, number("mscale")) / whole
    return yarn_magnitude(factor)


def _number(config: HFConfig, key: str, value: Any) -> float:
    number = HFConfig({key: value}, config.source).number(key, 0.0)
    if not _LEAST <= number <= _MOST:
        raise config.error(key, f"must be a positive number from {_LEAST} to {_MOST}, is {value!r}")
    return number
