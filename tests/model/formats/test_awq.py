"""AWQ: the packing of AutoAWQ's `WQLinear_GEMM`, done here value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_serve.errors import CheckpointError
from moe_serve.model.load.weight_reader import WeightReader
from tests.support.model.packing import pack_awq

ReaderOf = Callable[..., WeightReader]
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}


def test_a_word_by_hand(reader_of: ReaderOf) -> None:
    # Outputs 0 ... 7 of one input with the values 0 ... 7 are the word 0x75316420.
    tensors = {
        "m.qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "m.qzeros": torch.tensor([[0x00000001]], dtype=torch.int32),  # output 0's zero is 1
        "m.scales": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0.25]], dtype=torch.float16),
    }
    reader = reader_of(tensors, CONFIG | {"group_size": 1})
    reader.expect("m.weight", (8, 1))
    weight = reader.read("m.weight", (8, 1), torch.float32)
    assert weight.flatten().tolist() == [-1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.75]


@pytest.mark.parametrize("group_size", [16, -1])
def test_random(reader_of: ReaderOf, group_size: int) -> None:
    torch.manual_seed(0)
    num_groups = 1 if group_size == -1 else 48 // group_size
    values, zeros = torch.randint(0, 16, (48, 24)), torch.randint(0, 16, (num_groups, 24))
    scales = torch.rand(num_groups, 24).half()
    tensors = {"m.qweight": pack_awq(values), "m.qzeros": pack_awq(zeros), "m.scales": scales}
    reader = reader_of(tensors, CONFIG | {"group_size": group_size})
    reader.expect("m.weight", (24, 48))
    assert reader.format_name == f"awq int4 {'rows' if group_size == -1 else 'groups of 16'}"
    group = torch.arange(48) // (48 // num_groups)
    expected = ((values - zeros[group]).half() * scales[group]).T
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weight = reader.read("m.weight", (24, 48), dtype)
        assert torch.equal(weight, expected.to(dtype)), f"in {dtype}"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"version": "gemv"}, "version is 'gemv'; only 'gemm'"),
    ({"bits": 8}, "bits is 8; only 4"),
    ({"group_size": 0}, "group_size must be a positive integer"),
]


@pytest.mark.parametrize(("change", "complaint"), REFUSED)
def test_refused_configs(reader_of: ReaderOf, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        reader_of({"a": torch.zeros(1)}, CONFIG | change)


def test_refused_parts(reader_of: ReaderOf) -> None:
    good = {
        "m.qweight": torch.zeros(32, 1, dtype=torch.int32),
        "m.qzeros": torch.zeros(2, 1, dtype=torch.int32),
        "m.scales": torch.zeros(2, 8, dtype=torch.float16),
    }
    reader_of(good, CONFIG).expect("m.weight", (8, 32))
    with pytest.raises(CheckpointError, match="has 40 inputs, which groups of 16 do not divide"):
        reader_of(good, CONFIG).expect("m.weight", (8, 40))
    with pytest.raises(CheckpointError, match=r"m\.qzeros is missing; its module has"):
        reader_of({k: v for k, v in good.items() if k != "m.qzeros"}, CONFIG).expect(
            "m.weight", (8, 32)
        )
    with pytest.raises(CheckpointError, match=r"implies \[32, 2\]"):
        reader_of(good, CONFIG).expect("m.weight", (16, 32))
