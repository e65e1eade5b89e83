"""Layouts of weights: packing is reversible, and codes mean what the kernels read."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moe_kernels.gpu.grouped_gemm import weights
from moe_kernels.gpu.grouped_gemm.heuristics import WeightFormat
from moe_kernels.gpu.grouped_gemm.pack import int4_from_codes, mxfp4_from_codes, quantised

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("weight_format", "group", "error"),
    [("plain", 0, 0.0), ("int8", 0, 0.005), ("fp8_channel", 0, 0.04), ("fp8_block", 128, 0.04),
     ("int4", 32, 0.08), ("int4", 64, 0.08), ("int4", 128, 0.08), ("int4_zero", 64, 0.08),
     ("mxfp4", 32, 0.26), ("int8_zero", 32, 0.005), ("int8_zero", 128, 0.005)],
)  # fmt: skip
def test_quantised_weights_are_near(weight_format: WeightFormat, group: int, error: float) -> None:
    """Shapes are ragged for every group and block; the error is one step at the largest value."""
    weight = torch.randn(2, 2 * 150, 200, generator=torch.Generator().manual_seed(5))
    packed = quantised(weight, weight_format, group, 2)
    assert packed.num_outputs == 150 and packed.num_inputs == 200, packed
    found = ((packed.dequantised() - weight).abs().max() / weight.abs().max()).item()
    assert found <= error, f"{weight_format} {group}: {found}"


def test_two_codes_lie_in_a_byte_half_a_block_apart() -> None:
    codes = torch.arange(64).remainder(16).to(torch.uint8)[None, None]
    codes[..., 32:] = 15 - codes[..., 32:]
    packed = int4_from_codes(codes, torch.ones(1, 1, 2), None, 32, 1)
    want = codes[0, 0, :32] | codes[0, 0, 32:] << 4
    assert torch.equal(packed.values[0, 0], want), packed.values
    assert torch.equal(packed.dequantised()[0, 0], codes[0, 0].float() - 8.0), "codes less 8"


def test_int4_means_code_less_zero_times_scale() -> None:
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 16, (2, 3, 160), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (2, 3, 3), dtype=torch.uint8, generator=generator)
    scales = torch.rand(2, 3, 3, generator=generator)
    packed = int4_from_codes(codes, scales, zeros, 64, 1)
    groups = torch.arange(160) // 64
    want = (codes.float() - zeros.float()[:, :, groups]) * scales[:, :, groups]
    assert torch.equal(packed.dequantised(), want), "not (code - zero) * scale"


def test_mxfp4_means_value_times_a_power_of_two() -> None:
    codes = torch.arange(64).remainder(16).to(torch.uint8)[None, None]
    exponents = torch.tensor([[[127, 120]]], dtype=torch.uint8)
    values = torch.tensor(E2M1 + [-value for value in E2M1])
    want = torch.cat((values, values, values / 128, values / 128))
    found = mxfp4_from_codes(codes, exponents, 1).dequantised()[0, 0]
    assert torch.equal(found, want), found


@triton.jit
def _decode_kernel(bits_ptr, fp8_ptr, e2m1_ptr, HAS_FP8: tl.constexpr):
    places = tl.arange(0, 256)
    bits = tl.load(bits_ptr + places)
    tl.store(fp8_ptr + places, weights._e4m3(bits, HAS_FP8).to(tl.float32))
    tl.store(e2m1_ptr + places, weights._e2m1(bits & 15) * 16384.0)


def test_the_kernels_read_every_code(device: torch.device) -> None:
    """All e4m3 bits except the two NaN, and all e2m1 codes, are exact."""
    bits = torch.arange(256, device=device).to(torch.uint8)
    fp8, e2m1 = (torch.empty(256, device=device) for _ in range(2))
    _decode_kernel[(1,)](bits, fp8, e2m1, HAS_FP8=False)
    want = bits.view(torch.float8_e4m3fn).float()
    is_number = ~want.isnan()
    assert int(is_number.sum()) == 254, "two NaN"
    assert torch.equal(fp8[is_number], want[is_number]), "e4m3"
    values = torch.tensor(E2M1 + [-value for value in E2M1], device=device)
    assert torch.equal(e2m1, values.repeat(16)), "e2m1"
