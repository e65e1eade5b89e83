"""FP8: DeepSeek-V3's blocks, ragged ones too, and scales for a matrix or a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from moe_serve.errors import CheckpointError
from moe_serve.model.load.weight_reader import WeightReader

ReaderOf = Callable[..., WeightReader]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SCALARS = {"quant_method": "fp8", "activation_scheme": "static"}


def random_fp8(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(*shape) * 100).to(torch.float8_e4m3fn)


def test_a_block_by_hand(reader_of: ReaderOf) -> None:
    # E4M3: 0x38 is 1, 0x7E is 448, 0x01 is 2^-9, 0xB8 is -1.
    weight = torch.tensor([[0x38, 0x7E, 0x01, 0xB8]], dtype=torch.uint8)
    tensors = {
        "m.weight": weight.view(torch.float8_e4m3fn),
        "m.weight_scale_inv": torch.tensor([[2.0, 0.5]]),
    }
    reader = reader_of(tensors, BLOCKS | {"weight_block_size": [1, 2]})
    assert reader.format_name == "fp8 blocks of 1x2"
    read = reader.read("m.weight", (1, 4), torch.float32)
    assert read.tolist() == [[2.0, 896.0, 2.0**-10, -0.5]]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks_as_transformers(reader_of: ReaderOf, scale_dtype: torch.dtype) -> None:
    weight, scale = random_fp8(256, 384), torch.rand(2, 3).to(scale_dtype)
    reader = reader_of({"m.weight": weight, "m.weight_scale_inv": scale}, BLOCKS)
    reader.expect("m.weight", (256, 384))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        expected = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype)
        assert torch.equal(reader.read("m.weight", (256, 384), dtype), expected), f"in {dtype}"


@pytest.mark.parametrize("shape", [(576, 300), (1, 1), (129, 128)])
def test_ragged_blocks(reader_of: ReaderOf, shape: tuple[int, int]) -> None:
    weight = random_fp8(*shape)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128))
    reader = reader_of({"m.weight": weight, "m.weight_scale_inv": scale}, BLOCKS)
    reader.expect("m.weight", shape)
    expected = weight.float()
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            expected[block] *= scale[row, column]
    assert torch.equal(reader.read("m.weight", shape, torch.bfloat16), expected.bfloat16())


def test_scales_that_are_exponents(reader_of: ReaderOf) -> None:
    weight = random_fp8(128, 256)
    scale = torch.tensor([[126, 130]], dtype=torch.uint8)
    expected = weight.float() * torch.tensor([0.5, 8.0]).repeat_interleave(128)
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        reader = reader_of({"m.weight": weight, "m.weight_scale_inv": stored}, BLOCKS)
        reader.expect("m.weight", (128, 256))
        assert torch.equal(reader.read("m.weight", (128, 256), torch.float32), expected)


@pytest.mark.parametrize("scale_shape", [(), (1,), (1, 1), (6, 1)])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_a_scale_for_the_matrix_or_a_row(
    reader_of: ReaderOf, scale_shape: tuple[int, ...], suffix: str
) -> None:
    weight, scale = random_fp8(6, 10), torch.rand(scale_shape)
    tensors = {"m.weight": weight, "m.weight" + suffix: scale, "m.input_scale": torch.rand(1)}
    reader = reader_of(tensors, SCALARS)
    reader.expect("m.weight", (6, 10))
    assert reader.format_name == "fp8"
    expected = (weight.float() * scale).bfloat16()
    assert torch.equal(reader.read("m.weight", (6, 10), torch.bfloat16), expected)


def test_fused_experts(reader_of: ReaderOf) -> None:
    weight, scale = random_fp8(3, 200, 130), torch.rand(3, 2, 2)
    reader = reader_of({"experts.up": weight, "experts.up_scale_inv": scale}, BLOCKS)
    reader.expect("experts.up", weight.shape)
    whole = reader.read("experts.up", weight.shape, torch.float32)
    for expert in range(3):
        grid = scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
        expected = weight[expert].float() * grid
        one = reader.read("experts.up", weight.shape, torch.float32, expert)
        assert torch.equal(one, expected) and torch.equal(whole[expert], expected)


def test_nan_stays_nan(reader_of: ReaderOf) -> None:
    weight = torch.tensor([[0x7F, 0xFF, 0x00]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"m.weight": weight, "m.weight_scale": torch.ones(())}
    read = reader_of(tensors, SCALARS).read("m.weight", (1, 3), torch.bfloat16)
    assert read.isnan().tolist() == [[True, True, False]]


def test_refused(reader_of: ReaderOf) -> None:
    weight = random_fp8(256, 128)
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        (BLOCKS, {"m.weight": weight}, r"m\.weight_scale_inv is missing; its module has weight"),
        (BLOCKS, {"m.weight": weight, "m.weight_scale_inv": torch.ones(1, 1)},
         r"shape \[1, 1\], but fp8 blocks of 128x128 of a weight \[256, 128\] implies \[2, 1\]"),
        (BLOCKS, {"m.weight": weight, "m.weight_scale_inv": torch.ones(2, 1).long()},
         r"m\.weight_scale_inv has dtype I64; supported are F32, F16, BF16, F8_E8M0, U8"),
        (BLOCKS, {"m.weight": weight.to(torch.float8_e5m2)}, r"m\.weight has dtype F8_E5M2"),
        (SCALARS, {"m.weight": weight, "m.weight_scale": torch.ones(2, 1)},
         r"implies \[\] or \[1\] or \[1, 1\] or \[256, 1\]"),
    ]  # fmt: skip
    for config, tensors, complaint in cases:
        with pytest.raises(CheckpointError, match=complaint):
            reader_of(tensors, config).expect("m.weight", (256, 128))
    with pytest.raises(CheckpointError, match="weight_block_size must be two positive integers"):
        reader_of({"m.weight": weight}, BLOCKS | {"weight_block_size": [128]})
    with pytest.raises(CheckpointError, match=r"norm\.weight is F8_E4M3, but a weight of shape"):
        reader_of({"norm.weight": weight[0]}, BLOCKS).expect("norm.weight", (128,))
