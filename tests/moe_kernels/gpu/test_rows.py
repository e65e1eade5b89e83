"""Row kernels against the plain ones; additions bit for bit, norms to a rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.gpu.rows.api import Addends, add, add_and_norm, rms_norm
from moe_kernels.gpu.rows.heuristics import RowConfig, row_config
from moe_kernels.reference.norm import rms_norm as reference_norm
from moe_kernels.reference.torch_kernels import TorchKernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6


def random(device: torch.device, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 37, 64, 200])
def test_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = random(device, 5, width + 3).to(dtype)[:, :width]
    weight = random(device, width, seed=1).to(dtype)
    normed, expected = rms_norm(x, weight, EPS), reference_norm(x, weight, EPS)
    assert normed.dtype == dtype and normed.is_contiguous()
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=1e-6)
    for row in range(5):
        assert torch.equal(rms_norm(x[row : row + 1], weight, EPS)[0], normed[row]), f"row {row}"


def test_rms_norm_of_heads_with_a_wider_weight(device: torch.device) -> None:
    x, weight = random(device, 3, 2, 16).bfloat16(), random(device, 16, seed=1)
    normed = rms_norm(x, weight, EPS)
    assert normed.shape == x.shape and normed.dtype == torch.float32
    torch.testing.assert_close(normed, reference_norm(x, weight, EPS), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_more", [False, True], ids=["out", "out and more"])
def test_add_is_bit_for_bit(has_more: bool, dtype: torch.dtype, device: torch.device) -> None:
    hidden = random(device, 4, 96).to(dtype)
    out, more = random(device, 4, 96, seed=1) * 3, random(device, 4, 96, seed=2)
    given = more if has_more else None
    expected = TorchKernels().add(hidden, out, given)
    assert torch.equal(add(hidden, Addends(out_TD=out, more_TD=given)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_and_norm_is_both(dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = random(device, 4, 80).to(dtype), random(device, 80, seed=3).to(dtype)
    addends = Addends(out_TD=random(device, 4, 80, seed=1), more_TD=random(device, 4, 80, seed=2))
    total, normed = add_and_norm(hidden, addends, weight, EPS)
    assert torch.equal(total, add(hidden, addends))
    assert torch.equal(normed, rms_norm(total, weight, EPS)), "the norm is not of the rounded sum"


def test_a_gate_and_a_multiplier(device: torch.device) -> None:
    hidden, out, more = (random(device, 3, 48, seed=i) for i in range(3))
    gate = random(device, 3, 1, seed=5)
    total = add(hidden, Addends(out_TD=out, more_TD=more, gate_T=gate, multiplier=0.22))
    expected = hidden + 0.22 * (out + gate.sigmoid() * more)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)


def test_a_faulty_row_stays_alone_and_no_rows_are_fine(device: torch.device) -> None:
    x, weight = random(device, 3, 32), random(device, 32, seed=1)
    x[1, 5] = float("nan")
    normed = rms_norm(x, weight, EPS)
    assert normed[1].isnan().all() and torch.equal(normed[[0, 2]], rms_norm(x[[0, 2]], weight, EPS))
    assert rms_norm(x[:0], weight, EPS).shape == (0, 32)


def test_config_follows_the_width() -> None:
    assert row_config(7168) == RowConfig(block=8192, num_warps=16)
    assert row_config(1) == RowConfig(block=1, num_warps=1)
