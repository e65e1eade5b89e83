"""GPTQ: the packing of AutoGPTQ's `pack`, done here value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_serve.errors import CheckpointError
from moe_serve.model.load.weight_reader import WeightReader
from tests.support.model.packing import pack_columns, pack_rows

ReaderOf = Callable[..., WeightReader]
V1 = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}
V2 = V1 | {"checkpoint_format": "gptq_v2"}


def packed(
    values_KN: torch.Tensor, zeros_GN: torch.Tensor, scales_GN: torch.Tensor, bits: int, shift: int
) -> dict[str, torch.Tensor]:
    """Returns the tensors of module `m`; `shift` is subtracted from the zeros by the file
    format."""
    stored_zeros = (zeros_GN.long() - shift) % 2**bits
    return {
        "m.qweight": pack_rows(values_KN, bits),
        "m.qzeros": pack_columns(stored_zeros, bits),
        "m.scales": scales_GN,
    }


def random_parts(
    num_inputs: int, num_outputs: int, num_groups: int, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    values = torch.randint(0, 2**bits, (num_inputs, num_outputs))
    zeros = torch.randint(0, 2**bits, (num_groups, num_outputs))
    return values, zeros, torch.rand(num_groups, num_outputs).to(dtype)


def test_a_word_by_hand(reader_of: ReaderOf) -> None:
    # Eight inputs of one output (and seven outputs of zeros): the word 0x76543210 is 0, 1, ... 7.
    qweight = torch.zeros(1, 8, dtype=torch.int32)
    qweight[0, 1] = 0x76543210
    qzeros = torch.tensor([[0x00000020]], dtype=torch.int32)  # output 1's zero: 2, +1 in v1
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    tensors = {"m.qweight": qweight, "m.qzeros": qzeros, "m.scales": scales}
    weight = reader_of(tensors, V2).read("m.weight", (8, 8), torch.float32)
    assert weight[1].tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert weight[0].tolist() == [0.0] * 8
    weight = reader_of(tensors, V1).read("m.weight", (8, 8), torch.float32)
    assert weight[1].tolist() == [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert weight[0].tolist() == [-0.5] * 8


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_asymmetric_groups(
    reader_of: ReaderOf, bits: int, version: str, dtype: torch.dtype
) -> None:
    values, zeros, scales = random_parts(64, 16, 4, bits, dtype)
    zeros[0, 0] = 0  # stored as 15 or 255 by the first format
    tensors = packed(values, zeros, scales, bits, shift=1 if version == "gptq" else 0)
    config = V1 | {"bits": bits, "group_size": 16, "checkpoint_format": version}
    reader = reader_of(tensors, config)
    reader.expect("m.weight", (16, 64))
    assert reader.format_name == f"gptq int{bits} groups of 16"
    group = torch.arange(64) // 16
    expected = ((values - zeros[group]).to(dtype) * scales[group]).T
    for wanted in (dtype, torch.float32):
        weight = reader.read("m.weight", (16, 64), wanted)
        assert torch.equal(weight, expected.to(wanted)), f"{bits} bits in {wanted}"


def test_groups_by_activation_order(reader_of: ReaderOf) -> None:
    values, zeros, scales = random_parts(32, 8, 4, 4, torch.float16)
    g_idx = torch.arange(32)[torch.randperm(32)] // 8
    tensors = packed(values, zeros, scales, 4, shift=1) | {"m.g_idx": g_idx.to(torch.int32)}
    reader = reader_of(tensors, V1 | {"desc_act": True})
    reader.expect("m.weight", (8, 32))
    expected = ((values - zeros[g_idx]).half() * scales[g_idx]).T
    assert torch.equal(reader.read("m.weight", (8, 32), torch.float16), expected)


@pytest.mark.parametrize("fill", ["in order", "zeros"])
def test_g_idx_that_says_nothing(reader_of: ReaderOf, fill: str) -> None:
    values, zeros, scales = random_parts(32, 8, 4, 4, torch.float16)
    group = torch.arange(32) // 8
    g_idx = group if fill == "in order" else torch.zeros(32)
    tensors = packed(values, zeros, scales, 4, shift=1) | {"m.g_idx": g_idx.to(torch.int32)}
    weight = reader_of(tensors, V1).read("m.weight", (8, 32), torch.float16)
    assert torch.equal(weight, ((values - zeros[group]).half() * scales[group]).T)


def test_one_group_and_a_ragged_last_group(reader_of: ReaderOf) -> None:
    values, zeros, scales = random_parts(24, 8, 1, 4, torch.float16)
    reader = reader_of(packed(values, zeros, scales, 4, shift=1), V1 | {"group_size": -1})
    reader.expect("m.weight", (8, 24))
    assert reader.format_name == "gptq int4 rows"
    assert torch.equal(
        reader.read("m.weight", (8, 24), torch.float16), ((values - zeros).half() * scales).T
    )
    values, zeros, scales = random_parts(24, 8, 2, 4, torch.float16)  # groups of 16 and 8
    reader = reader_of(packed(values, zeros, scales, 4, shift=1), V1 | {"group_size": 16})
    reader.expect("m.weight", (8, 24))
    group = torch.arange(24) // 16
    expected = ((values - zeros[group]).half() * scales[group]).T
    assert torch.equal(reader.read("m.weight", (8, 24), torch.float16), expected)


def test_modules_with_bits_of_their_own(reader_of: ReaderOf) -> None:
    values, zeros, scales = random_parts(32, 8, 2, 8, torch.float16)
    dynamic = {r"-:.*lm_head": {}, r"+:m$": {"bits": 8, "group_size": 16}}
    tensors = packed(values, zeros, scales, 8, shift=1)
    reader = reader_of(tensors, V1 | {"dynamic": dynamic})
    reader.expect("m.weight", (8, 32))
    group = torch.arange(32) // 16
    expected = ((values - zeros[group]).half() * scales[group]).T
    assert torch.equal(reader.read("m.weight", (8, 32), torch.float16), expected)


def test_null_is_as_if_it_were_not_there(reader_of: ReaderOf) -> None:
    values, zeros, scales = random_parts(256, 8, 2, 4, torch.float16)
    tensors = packed(values, zeros, scales, 4, shift=1)
    dynamic = {"m$": {"bits": None, "group_size": None}}
    weights = []
    for config in ({"group_size": None}, {"group_size": 128, "dynamic": dynamic}):
        reader = reader_of(tensors, V1 | config)
        reader.expect("m.weight", (8, 256))
        weights.append(reader.read("m.weight", (8, 256), torch.float16))
    group = torch.arange(256) // 128
    for weight in weights:
        assert torch.equal(weight, ((values - zeros[group]).half() * scales[group]).T)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"bits": 3}, "quantization_config: bits is 3; supported are 4, 8"),
    ({"bits": None}, "bits is missing"),
    ({"group_size": 0}, "group_size must be a positive integer, is 0"),
    ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are 'gptq'"),
    ({"is_marlin_format": True}, "is_marlin_format is True; only False is supported"),
    ({"dynamic": {"+:(": {}}}, r"dynamic has '\+:\(', which is not a valid pattern"),
    (
        {"dynamic": {"a{99999999999}": {}}},
        r"has 'a\{99999999999\}', which is not a valid",
    ),
    ({"dynamic": {"(" * 9999: {}}}, r"dynamic has '\(\(.*', which is not a valid pattern"),
    ({"dynamic": {"a": {"bits": 2}}}, "dynamic: bits is 2"),
    ({"dynamic": {"a": 4}}, "dynamic must give an object for 'a'"),
]


@pytest.mark.parametrize(("change", "complaint"), REFUSED_CONFIGS)
def test_refused_configs(reader_of: ReaderOf, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        reader_of({"a": torch.zeros(1)}, V1 | change)


def test_refused_parts(reader_of: ReaderOf) -> None:
    good = packed(*random_parts(32, 8, 4, 4, torch.float16), 4, shift=1)
    g_idx = torch.full((32,), 4, dtype=torch.int32)
    cases = [
        ({k: v for k, v in good.items() if k != "m.scales"}, r"m\.scales is missing"),
        (good | {"m.qweight": good["m.qweight"][:2]},
         r"m\.qweight has shape \[2, 8\], but gptq int4 of a weight \[8, 32\] implies \[4, 8\]"),
        (good | {"m.qzeros": good["m.qzeros"].float()}, r"m\.qzeros has dtype F32"),
        (good | {"m.scales": good["m.scales"].long()}, r"m\.scales has dtype I64"),
        (good | {"m.g_idx": g_idx[:3]}, r"m\.g_idx has shape \[3\]"),
    ]  # fmt: skip
    for tensors, complaint in cases:
        with pytest.raises(CheckpointError, match=complaint):
            reader_of(tensors, V1).expect("m.weight", (8, 32))
    with pytest.raises(CheckpointError, match=r"m\.g_idx names groups outside the 4 that exist"):
        reader_of(good | {"m.g_idx": g_idx}, V1).read("m.weight", (8, 32), torch.float16)
    with pytest.raises(CheckpointError, match=r"shape \[7, 32\], which cannot be packed"):
        reader_of(good, V1).expect("m.weight", (7, 32))
