"""Rounding to nearest and GPTQ, and the stored words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_serve.quantize.column_rounding import gptq_rounded
from moe_serve.quantize.rounded_matrix import RoundedMatrix, Storage
from moe_serve.quantize.rtn import rounded
from tests.support.model.packing import pack_offset

STORAGES = [Storage(4, 32), Storage(4, 64), Storage(8, 32), Storage(8, 0), Storage(4, 0)]


def _matrix(seed: int, rows: int = 24, columns: int = 128) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _output_error(weight: Tensor, result: RoundedMatrix, inputs: Tensor) -> float:
    return float(((weight - result.floats(torch.float32)) @ inputs.T).square().mean())


@pytest.mark.parametrize("storage", STORAGES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_is_the_nearest(storage: Storage, dtype: torch.dtype) -> None:
    weight = _matrix(0)
    result = rounded(weight, storage, dtype)
    assert result.scales_NG.dtype == dtype
    assert result.scales_NG.shape == (24, storage.num_groups(128))
    scales = result.scales_NG.float().repeat_interleave(128 // result.scales_NG.shape[1], 1)
    expected = (weight / scales).round().clamp(-storage.most - 1, storage.most)
    assert torch.equal(result.values_NK.float(), expected)
    product = (result.values_NK.float() * scales).to(dtype).float()
    assert torch.equal(result.floats(torch.float32), product)


def test_a_group_of_zeros_stays_zero() -> None:
    weight = _matrix(1)
    weight[3, 32:64] = 0
    result = rounded(weight, Storage(4, 32), torch.bfloat16)
    assert not result.floats(torch.float32)[3, 32:64].any()
    assert result.scales_NG.isfinite().all()


def test_chosen_scales_are_no_worse_than_those_that_fit_the_largest_value() -> None:
    weight = _matrix(2)
    result = rounded(weight, Storage(4, 32), torch.float32)
    groups = weight.unflatten(1, (4, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    plain = ((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(-1)
    chosen = (result.floats(torch.float32) - weight).unflatten(1, (4, 32)).square().sum(-1)
    assert (chosen <= plain + 1e-6).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [64, 70])
def test_words_are_those_of_the_definition(bits: int, columns: int) -> None:
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, columns), dtype=torch.int8)
    result = RoundedMatrix(Storage(bits, 0), values, torch.ones(5, 1))
    stored = dict(result.stored("w"))
    assert torch.equal(stored["w_packed"], pack_offset(values, bits))
    assert stored["w_shape"].tolist() == [5, columns]
    planned = {
        p.name: (p.dtype, p.shape) for p in result.storage.planned("w", (5, columns), torch.float32)
    }
    assert planned == {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()}


def test_gptq_beats_nearest_on_correlated_inputs() -> None:
    weight = _matrix(3)
    inputs = _matrix(4, 400, 16) @ _matrix(5, 16, 128) + 0.1 * _matrix(6, 400)
    storage = Storage(4, 32)
    hessian = inputs.T @ inputs / len(inputs)
    nearest = rounded(weight, storage, torch.float32)
    result = gptq_rounded(weight, hessian, storage, torch.float32)
    errors = [_output_error(weight, each, inputs) for each in (result, nearest)]
    assert errors[0] < 0.5 * errors[1], errors


def test_gptq_with_uncorrelated_inputs_is_nearest() -> None:
    """H is a multiple of the identity, so no column can compensate another."""
    weight, storage = _matrix(7), Storage(4, 32)
    result = gptq_rounded(weight, 3.0 * torch.eye(128), storage, torch.float32)
    nearest = rounded(weight, storage, torch.float32)
    assert torch.equal(result.values_NK, nearest.values_NK)
    assert torch.equal(result.scales_NG, nearest.scales_NG)


@pytest.mark.parametrize("hessian", [torch.zeros(128, 128), torch.ones(128, 128)])
def test_gptq_survives_singular_moments(hessian: Tensor) -> None:
    result = gptq_rounded(_matrix(8), hessian, Storage(4, 32), torch.bfloat16)
    assert result.floats(torch.float32).isfinite().all()
