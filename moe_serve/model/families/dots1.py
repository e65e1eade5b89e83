"""dots.llm1: Qwen3's attention with DeepSeek-V3's router and shared experts."""

from __future__ import annotations

from moe_serve.model.checkpoint.hf_config import HFConfig
from moe_serve.model.checkpoint.hf_rope import read_rope
from moe_serve.model.families.config_parts import (
    Family,
    biased_sigmoid_router,
    decoder,
    grouped_attention,
    head_dim_of,
    mixed_layers,
    shared_expert,
    sparse_layers,
    windowed_layers,
)
from moe_serve.model.spec import ModelSpec


def _read_spec(config: HFConfig) -> ModelSpec:
    norm_eps = config.number("rms_norm_eps", 1e-6)
    rope = read_rope(config, head_dim=head_dim_of(config))
    attention = grouped_attention(config, rope, qk_norm="head", norm_eps=norm_eps)
    first_window = config.number("max_window_layers", 62)
    has_window = config.get("sliding_window") is not None
    windows = windowed_layers(config, attention, lambda i: has_window and i >= first_window)
    return decoder(
        config,
        norm_eps=norm_eps,
        family="dots1",
        layers=mixed_layers(windows, sparse_layers(config)),
        shared=shared_expert(config),
        router=biased_sigmoid_router(config, scaling=1.0),
        rope=rope,
    )


FAMILY = Family(name="dots1", architectures=("Dots1ForCausalLM",), read_spec=_read_spec)
