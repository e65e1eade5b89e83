"""Writes the model card: the demonstration model's purpose, limits, and sources of text."""

from __future__ import annotations

from pathlib import Path

from .network import Shape

_SOURCES = Path(__file__).with_name("sources.md")
_TEMPLATE = Path(__file__).with_name("model_card_template.md")


def model_card(shape: Shape, *, num_steps: int, train_seconds: float) -> str:
    """Returns the README.md of the exported folder."""
    total, active = num_parameters(shape)
    sizes = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    return _TEMPLATE.read_text(encoding="utf-8").format(
        **sizes,
        params_m=total / 1e6,
        active_m=active / 1e6,
        num_steps=num_steps,
        train_minutes=train_seconds / 60,
        sources=_SOURCES.read_text(encoding="utf-8"),
    )


def num_parameters(shape: Shape) -> tuple[int, int]:
    """Returns the number of all parameters, and of those that one token uses (the tied head counts
    once)."""
    expert = 3 * shape.expert_width * shape.width
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * shape.width
    norms = 2 * shape.width + 2 * shape.head_dim
    layer = attention + norms + shape.num_experts * shape.width
    dense = shape.vocab_size * shape.width + shape.width + shape.num_layers * layer
    all_experts = shape.num_layers * shape.num_experts * expert
    return dense + all_experts, dense + shape.num_layers * shape.top_k * expert
