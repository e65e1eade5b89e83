"""Linear layers as grouped products of one expert, or of one expert per head.

    T rows, K inputs, N outputs, H heads, E experts, M rows of a tile, P = tiles * M positions

A library's matrix product chooses its kernel, and with it the order of a row's sum, by the number
of rows. These sums depend on the weights' shape alone, as those of the experts do.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_kernels.gpu.align.api import Alignment
from moe_kernels.gpu.grouped_gemm.api import Chip, Product, multiply
from moe_kernels.gpu.grouped_gemm.heuristics import BLOCK_MS, choose_block_m
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight

_FIRST_ROWS = 8192
_STRIDE = 4  # of the tiles' numbers: each begins at 16 bytes, so that no kernel is compiled twice
_CHECKED_ROWS = 160


class RowTiles:
    """Alignments that need no sorting, cut from tables that all linears of a device share.

    The tables grow to the largest batch seen; a batch of that size must come before a CUDA graph
    is captured, or the table would be filled by the replay alone. Tables that were outgrown are
    kept, as a graph may read them.
    """

    def __init__(self, device: torch.device, num_rows: int = _FIRST_ROWS) -> None:
        self._device = device
        self._kept: list[tuple[Tensor, ...]] = []
        self._grow(num_rows)

    def _grow(self, num_rows: int) -> None:
        numbers = torch.arange(num_rows, dtype=torch.int32, device=self._device)
        self._numbers, self._zeros = numbers, torch.zeros_like(numbers)
        self._num_tiles = numbers[: num_rows // BLOCK_MS[0] + 1].repeat_interleave(_STRIDE)
        self._kept.append((self._numbers, self._zeros, self._num_tiles))

    def of_rows(self, num_rows: int, block_m: int) -> Alignment:
        """All rows belong to expert 0, slot s is row s: a padded tile ends in slots from T on."""
        num_tiles = self._reserve(num_rows, block_m)
        return Alignment(
            block_rows=block_m,
            max_tiles=num_tiles,
            num_slots=num_rows,
            tile_experts=self._zeros[:num_tiles],
            sorted_slots=self._numbers[: num_tiles * block_m],
            num_tiles=self._count(num_tiles),
            counts_E=None,
            tile_starts_E=None,
        )

    def of_heads(self, num_rows: int, num_heads: int, block_m: int) -> Alignment:
        """Head h is expert h; its positions are rows [h * P / H, ..), slot t * H + h is row t.

        Example, T = 3, H = 2, M = 2: slots [0 2 | 4 6 | 1 3 | 5 7], of which 6 and 7 are padding.
        """
        per_head = self._reserve(num_rows, block_m)
        self._reserve(num_heads * per_head, 1)
        heads_H1, rows = self._numbers[:num_heads, None], self._numbers[: per_head * block_m]
        return Alignment(
            block_rows=block_m,
            max_tiles=num_heads * per_head,
            num_slots=num_rows * num_heads,
            tile_experts=heads_H1.expand(-1, per_head).reshape(-1),
            sorted_slots=torch.add(heads_H1, rows[None], alpha=num_heads).view(-1),
            num_tiles=self._count(num_heads * per_head),
            counts_E=None,
            tile_starts_E=None,
        )

    def _reserve(self, num_rows: int, block_m: int) -> int:
        """Tiles of these rows, which the tables then have."""
        num_tiles = -(-num_rows // block_m)
        needed = max(num_tiles * block_m, num_tiles * BLOCK_MS[0])
        if needed > len(self._numbers):
            is_capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not is_capturing, f"a graph of {num_rows} rows needs one such batch before it"
            self._grow(1 << (needed - 1).bit_length())
        return num_tiles

    def _count(self, num_tiles: int) -> Tensor:
        return self._num_tiles[num_tiles * _STRIDE :][:1]


class GroupedLinear:
    """Implements Linear: x in the weight's dtype, sums in fp32 rounded once to `out_dtype`."""

    def __init__(
        self,
        weight_1NK: GroupedWeight,
        bias_N: Tensor | None,
        tiles: RowTiles,
        chip: Chip,
        out_dtype: torch.dtype,
    ) -> None:
        assert weight_1NK.num_experts == 1, f"{weight_1NK.num_experts} matrices of a linear layer"
        self._weight, self._tiles, self.chip = weight_1NK, tiles, chip
        self._bias = None if bias_N is None else bias_N.clone()
        self._out_dtype = out_dtype

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        out_TN = self.product(x_TK)
        return out_TN if residual_TN is None else residual_TN + out_TN

    def product(self, x_TK: Tensor, block_m: int | None = None) -> Tensor:
        """x W^T + bias; `block_m` forces a tile size."""
        num_rows, weight = len(x_TK), self._weight
        assert x_TK.shape == (num_rows, weight.num_inputs), f"x is {list(x_TK.shape)}"
        x_TK = x_TK.to(weight.values.dtype).contiguous()
        out_TN = x_TK.new_empty(num_rows, weight.num_outputs, dtype=self._out_dtype)
        if num_rows == 0:
            return out_TN
        if block_m is None:
            block_m = choose_block_m(num_rows, 1, self.chip.has_equal_tiles)
        product = Product(weight=weight, bias=self._bias, x=x_TK, out=out_TN, is_gated=False)
        multiply(product, self._tiles.of_rows(num_rows, block_m), 1, self.chip)
        return out_TN


class GroupedRouterLinear:
    """Implements RouterLinear."""

    def __init__(self, logits: GroupedLinear) -> None:
        self._logits = logits

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._logits(x_TD)


class GroupedHeadLinear:
    """Implements HeadLinear: a head is an expert that every row visits."""

    def __init__(self, weight_HNK: GroupedWeight, tiles: RowTiles, chip: Chip) -> None:
        self._weight, self._tiles, self.chip = weight_HNK, tiles, chip

    def __call__(self, x_THK: Tensor) -> Tensor:
        return self.product(x_THK)

    def product(self, x_THK: Tensor, block_m: int | None = None) -> Tensor:
        """Returns each head's x W^T [T, H, N]; `block_m` forces a tile size."""
        num_rows, weight = len(x_THK), self._weight
        num_heads, num_inputs = weight.num_experts, weight.num_inputs
        assert x_THK.shape[1:] == (num_heads, num_inputs), f"x is {list(x_THK.shape)}"
        dtype = weight.values.dtype
        out_THN = x_THK.new_empty(num_rows, num_heads, weight.num_outputs, dtype=dtype)
        if num_rows == 0:
            return out_THN
        if block_m is None:
            has_equal_tiles = self.chip.has_equal_tiles
            block_m = choose_block_m(num_rows * num_heads, num_heads, has_equal_tiles)
        alignment = self._tiles.of_heads(num_rows, num_heads, block_m)
        per_head = alignment.max_tiles // num_heads * block_m
        # The padding of a head never reaches a stored row, but must be allocated.
        x_HPK = x_THK.new_empty(num_heads, per_head, num_inputs, dtype=dtype)
        x_HPK[:, :num_rows] = x_THK.transpose(0, 1)
        product = Product(
            weight=weight, bias=None, x=x_HPK.flatten(0, 1), out=out_THN, is_gated=False
        )
        multiply(product, alignment, 1, self.chip)
        return out_THN


def has_equal_tiles(linear: GroupedLinear | GroupedHeadLinear, x: Tensor) -> bool:
    """Checks that rows have the same bits in all tile sizes, as api.py does for experts.

    Waits for the device: at load, never while a CUDA graph is captured.
    """
    chip, linear.chip = linear.chip, replace(linear.chip, has_equal_tiles=True)
    try:
        results = [linear.product(x, block_m) for block_m in BLOCK_MS]
        alone = linear.product(x[:1], BLOCK_MS[0])
    finally:
        linear.chip = chip
    is_equal = all(torch.equal(result, results[0]) for result in results[1:])
    return is_equal and torch.equal(alone[0], results[0][0])


def checked_rows(*widths: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows [T, *widths], enough for tiles of every size."""
    generator = torch.Generator(device=device).manual_seed(1)
    rows = torch.randn(_CHECKED_ROWS, *widths, generator=generator, device=device)
    return rows.to(dtype)
