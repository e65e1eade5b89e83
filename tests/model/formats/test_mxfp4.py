"""MXFP4: by hand from the standard's tables, and bit for bit like transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moe_serve.errors import CheckpointError
from moe_serve.model.load.weight_reader import WeightReader

ReaderOf = Callable[..., WeightReader]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def stored(blocks: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    return {NAME + "_blocks": blocks, NAME + "_scales": scales}


def test_a_block_by_hand(reader_of: ReaderOf) -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0x72  # low first: 2 is 1.0, 7 is 6.0
    blocks[0, 0, 0, 15] = 0x9F  # F is -6.0, 9 is -0.5
    reader = reader_of(stored(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8)), CONFIG)
    weight = reader.read(NAME, (1, 32, 1), torch.float32)
    assert weight.shape == (1, 32, 1)
    assert weight.flatten().tolist() == [2.0, 12.0, *[0.0] * 28, -12.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_values_and_scales_as_transformers(reader_of: ReaderOf, dtype: torch.dtype) -> None:
    # Each of the 255 scales over all 256 bytes: [1, 16 columns, 255 blocks, 16 bytes].
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(1, 16, 255, 16)
    scales = torch.arange(255, dtype=torch.uint8).expand(1, 16, 255)
    reader = reader_of(stored(blocks, scales), CONFIG)
    shape = (1, 255 * 32, 16)
    reader.expect(NAME, shape)
    weight = reader.read(NAME, shape, dtype)
    expected = convert_moe_packed_tensors(blocks.contiguous(), scales.contiguous(), dtype=dtype)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(weight.contiguous().view(bits), expected.view(bits)), "bits differ"


def test_a_scale_of_255_is_nan(reader_of: ReaderOf) -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    reader = reader_of(stored(blocks, torch.full((1, 1, 1), 255, dtype=torch.uint8)), CONFIG)
    assert reader.read(NAME, (1, 32, 1), torch.bfloat16).isnan().all()


def test_one_expert_is_a_part_of_all(reader_of: ReaderOf) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 2), dtype=torch.uint8)
    reader = reader_of(stored(blocks, scales), CONFIG)
    whole = reader.read(NAME, (3, 64, 10), torch.bfloat16)
    assert torch.equal(whole, convert_moe_packed_tensors(blocks, scales))
    for expert in range(3):
        one = reader.read(NAME, (3, 64, 10), torch.bfloat16, expert)
        assert torch.equal(one, whole[expert]), f"expert {expert}"
        reader.done(NAME, expert)


def test_refused(reader_of: ReaderOf) -> None:
    blocks = torch.zeros(2, 10, 2, 16, dtype=torch.uint8)
    scales = torch.zeros(2, 10, 2, dtype=torch.uint8)
    reader = reader_of(stored(blocks, scales), CONFIG)
    assert reader.has(NAME) and not reader.has(NAME + "_blocks.weight")
    with pytest.raises(CheckpointError, match="blocks of 32 inputs, but config.json implies"):
        reader.expect(NAME, (2, 65, 10))
    with pytest.raises(CheckpointError, match=r"gate_up_proj_blocks has shape \[2, 10, 2, 16\]"):
        reader.expect(NAME, (2, 64, 12))
    with pytest.raises(CheckpointError, match="gate_up_proj_scales has dtype I8"):
        reader_of(stored(blocks, scales.to(torch.int8)), CONFIG).expect(NAME, (2, 64, 10))
    with pytest.raises(CheckpointError, match="gate_up_proj_scales is missing"):
        reader_of({NAME + "_blocks": blocks}, CONFIG).expect(NAME, (2, 64, 10))
    with pytest.raises(CheckpointError, match="gate_up_proj is missing"):
        reader_of({NAME + "_scales": scales}, CONFIG).expect(NAME, (2, 64, 10))
