"""The tile of a product follows from shapes alone, and all tiles get the same inputs of a step."""

from __future__ import annotations

import pytest

from moe_kernels.gpu.grouped_gemm.heuristics import (
    BLOCK_MS,
    FIXED_BLOCK_M,
    ProductShape,
    choose_block_m,
    choose_tile,
)

QWEN3_UP = ProductShape(num_inputs=2048, num_outputs=768, is_gated=True)


@pytest.mark.parametrize(
    ("num_slots", "block_m"),
    [(8, 16), (16 * 8, 16), (128 * 16, 16), (128 * 16 + 1, 64), (128 * 64 + 1, 128), (2**20, 128)],
)
def test_tiles_hold_an_experts_share(num_slots: int, block_m: int) -> None:
    assert choose_block_m(num_slots, 128, has_equal_tiles=True) == block_m
    assert choose_block_m(num_slots, 128, has_equal_tiles=False) == FIXED_BLOCK_M


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("weight_format", "group", "block_c"),
    [("plain", 0, 64), ("int8", 0, 128), ("fp8_block", 128, 128), ("int4", 32, 64),
     ("int4_zero", 128, 128), ("mxfp4", 32, 64)],
)  # fmt: skip
def test_inputs_of_a_step_do_not_depend_on_the_tile(
    weight_format: str, group: int, block_c: int, capability: int
) -> None:
    shape = ProductShape(
        num_inputs=2048,
        num_outputs=768,
        is_gated=True,
        weight_format=weight_format,  # type: ignore[arg-type]
        group=group,
    )
    found = {choose_tile(block_m, shape, capability).block_c for block_m in BLOCK_MS}
    assert found == {block_c}, f"{weight_format}: {found}"


def test_many_rows_come_by_tma_where_the_chip_and_the_weights_allow() -> None:
    assert choose_tile(128, QWEN3_UP, 90).uses_tma, "Hopper, bf16"
    assert not choose_tile(128, QWEN3_UP, 80).uses_tma, "no TMA before Hopper"
    assert not choose_tile(16, QWEN3_UP, 90).uses_tma, "few rows"
    odd = ProductShape(num_inputs=2044, num_outputs=768, is_gated=True)
    assert not choose_tile(128, odd, 90).uses_tma, "rows of 4088 bytes"
    fp8 = ProductShape(num_inputs=2048, num_outputs=768, is_gated=True, weight_format="fp8_channel")
    assert not choose_tile(128, fp8, 90).uses_tma, "fp8 is converted in registers"
