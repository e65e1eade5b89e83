"""When FlashAttention may serve, and what it is called with."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen

from moe_kernels.gpu.paged_attention import backends
from moe_kernels.gpu.paged_attention.backends import BackendName, choose_backend
from moe_kernels.interface.attention_shape import AttentionShape, StepTokens

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128)
ALL: frozenset[BackendName] = frozenset({"FA3", "FA4"})
BF16 = torch.bfloat16


def choose(
    shape: AttentionShape = SHAPE, dtype: torch.dtype = BF16, page_size: int = 16,
    capability: tuple[int, int] = (9, 0), installed: frozenset[BackendName] = ALL,
    is_row_invariant: bool = False,
) -> tuple[str, str]:  # fmt: skip
    choice = choose_backend(shape, dtype, page_size, capability, installed, is_row_invariant)
    return choice.name, choice.reason


def test_hopper_takes_fa3_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose() == ("FA3", "it is installed and takes the shape")
    assert "paged attention: FA3, it is installed" in caplog.text


def test_blackwell_takes_fa4_with_large_pages() -> None:
    assert choose(capability=(10, 0), page_size=128)[0] == "FA4"
    assert choose(capability=(10, 0)) == ("triton", "FA4 wants pages of 128 tokens, not 16")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"is_row_invariant": True}, "same row in a prefill chunk"),
        ({"installed": frozenset()}, "FA3 .* is not installed"),
        ({"capability": (8, 0)}, "no FlashAttention takes pages on sm_80"),
        ({"dtype": torch.float32}, "does not take float32"),
        ({"shape": replace(SHAPE, has_sinks=True)}, "no sinks"),
        ({"shape": replace(SHAPE, chunk=64)}, "no chunks"),
        ({"shape": replace(SHAPE, value_dim=64)}, "values of 64 beside keys of 128"),
        ({"shape": replace(SHAPE, head_dim=288)}, "heads of 288"),
    ],
)
def test_ours_otherwise(changed: dict[str, Any], reason: str) -> None:
    name, why = choose(**changed)
    assert name == "triton"
    assert re.search(reason, why), f"{why!r} instead of {reason!r}"


def test_nothing_is_installed_where_no_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_MODULES", {"FA3": "no_such_module", "FA4": "no_such.module"})
    assert backends.installed_backends() == frozenset()


def test_the_varlen_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def attend(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append((arguments, named))
        return torch.zeros(4, 8, 128)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    step = StepTokens(np.array([1, 3]), np.array([17, 0]), [[4, 2], [5]], 16)
    plan = backends.plan_varlen(step, torch.device("cpu"))
    pages = torch.zeros(6, 2, 16, 128, dtype=BF16)
    shape = replace(SHAPE, sliding_window=9)
    backends.varlen_attention(torch.zeros(4, 8, 128), pages, pages, plan, shape)
    (q, keys, values, ends, key_ends, max_q, max_k), named = calls[0]
    assert q.dtype == BF16 and keys.shape == values.shape == (6, 16, 2, 128)
    assert ends.tolist() == [0, 1, 4] and key_ends is None and (max_q, max_k) == (3, 18)
    assert named["seqused_k"].tolist() == [18, 3] and named["num_splits"] == 1
    assert named["block_table"].tolist() == [[4, 2], [5, 0]] and named["enable_gqa"]
    assert named["window_size"] == (8, 0), "a token and the 8 before it"
    assert {t.dtype for t in (ends, named["seqused_k"], named["block_table"])} == {torch.int32}
