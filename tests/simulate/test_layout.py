"""Layouts: what their names mean, the memory they need, and what is refused."""

from __future__ import annotations

import pytest

from moe_serve.errors import ConfigError
from moe_serve.simulate.layout import Layout, ModelSize

GIB = 2**30
SIZE = ModelSize(
    name="made-up",
    attention_bytes=8 * GIB,
    expert_bytes=64 * GIB,
    kv_token_bytes=2**16,
    num_kv_parts=4,
    num_experts=128,
    max_context=4096,
)


@pytest.mark.parametrize(
    ("text", "devices", "shards", "counts"),
    [
        ("colocated", 8, 1, (1, 8, 0)),
        ("colocated", 8, 4, (1, 2, 0)),
        ("4xcolocated", 8, 1, (4, 2, 0)),
        ("replicas", 8, 1, (8, 1, 0)),
        ("replicas", 8, 2, (4, 1, 0)),
        ("2A4E", 6, 1, (1, 2, 4)),
        ("2a4e", 8, 2, (1, 2, 4)),
        ("2x2A4E", 12, 1, (2, 2, 4)),
    ],
)
def test_names(text: str, devices: int, shards: int, counts: tuple[int, int, int]) -> None:
    layout = Layout.parse(text, devices, shards)
    assert (layout.num_cells, layout.num_attention, layout.num_experts) == counts
    assert layout.num_devices == devices


@pytest.mark.parametrize(
    ("text", "devices", "shards", "message"),
    [
        ("2A4E", 8, 1, "takes 6 devices, but devices is 8"),
        ("replicas", 8, 3, "takes 6 devices, but devices is 8"),
        ("3xcolocated", 8, 1, "takes 6 devices"),
        ("9xcolocated", 8, 1, "takes 9 devices"),
        ("2A", 2, 1, "layout cannot be '2A'"),
        ("colocated", 0, 1, r"devices must be in \[1, 1024\], got 0"),
        ("colocated", 2, 3, r"tensor-shards must be in \[1, 2\]"),
    ],
)
def test_refused(text: str, devices: int, shards: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.parse(text, devices, shards)


def test_pages_are_what_the_weights_leave() -> None:
    """Of 24 GiB: 8 GiB of attention and 8 of experts leave 8 GiB for tokens of 64 KiB."""
    colocated = Layout.parse("colocated", 8)
    assert SIZE.device_bytes(colocated) == (16 * GIB, 0)
    assert SIZE.num_pages(colocated, 24 * GIB, 16) == 8 * GIB // 2**16 // 16
    split = Layout.parse("2A4E", 6)
    assert SIZE.device_bytes(split) == (8 * GIB, 16 * GIB)
    assert SIZE.num_pages(split, 24 * GIB, 16) == 16 * GIB // 2**16 // 16
    sharded = Layout.parse("replicas", 8, 8)  # 1 + 8 GiB; four parts of the cache for eight shards
    assert SIZE.num_pages(sharded, 24 * GIB, 16) == 15 * GIB // 2**14 // 16


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    message = r"weights of an attention device are 72.0 GiB, and 24.0 GiB of its memory are usable"
    with pytest.raises(ConfigError, match=message):
        SIZE.num_pages(Layout.parse("replicas", 8), 24 * GIB, 16)
    with pytest.raises(ConfigError, match=r"weights of an expert device are 32.0 GiB"):
        SIZE.num_pages(Layout.parse("1A2E", 3), 24 * GIB, 16)
