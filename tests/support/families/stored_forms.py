"""The ways to store one matrix in few bits, and the values they give (docs/guide/checkpoints.md).

N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.model.packing import pack_awq, pack_columns, pack_offset, pack_rows

BLOCK = 128


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A stored matrix. `parts` has the tensors by their names after the module's; `weight` has the
    values in float32."""

    parts: dict[str, Tensor]
    weight_NK: Tensor


Form = Callable[[int, int], StoredMatrix]  # (N, K) -> a random matrix


def fp8(
    sharing: str,
    *,
    suffix: str = "weight_scale_inv",
    scale_dtype: torch.dtype = torch.float32,
    is_rounded: bool = False,
    has_input_scale: bool = False,
) -> Form:
    """Returns E4M3 weights with a scale for each "block", "row" or "matrix" (for "fused matrix" a
    scale of shape [1, 1]).

    `is_rounded`: the product, to the scale's dtype.
    """

    def store(n: int, k: int) -> StoredMatrix:
        values_NK = (torch.randn(n, k) * 100).to(torch.float8_e4m3fn)
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        shape = {"block": blocks, "row": (n, 1), "matrix": (), "fused matrix": (1, 1)}[sharing]
        scale = _scales(shape, 0.002).to(scale_dtype)
        whole_NK = scale.float()
        if sharing == "block":
            whole_NK = whole_NK.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:n, :k]
        product_NK = values_NK.float() * whole_NK
        parts = {"weight": values_NK, suffix: scale}
        if has_input_scale:
            parts["input_scale"] = torch.tensor(0.5)
        return StoredMatrix(parts, _rounded(product_NK, scale_dtype if is_rounded else None))

    return store


def compressed_int(
    bits: int,
    group_size: int = -1,
    *,
    is_symmetric: bool = True,
    is_packed: bool = True,
    is_shuffled: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Form:
    """Returns weights as compressed-tensors stores them, with scales for rows, or for groups that
    may be shuffled."""

    def store(n: int, k: int) -> StoredMatrix:
        groups_K, num_groups = _groups(k, group_size, is_shuffled)
        half = 2 ** (bits - 1)
        values_NK = torch.randint(-half, half, (n, k))
        scale_NG = _scales((n, num_groups), 0.3 / half).to(scale_dtype)
        zeros_NG = torch.zeros(n, num_groups, dtype=torch.int64)
        parts = {"weight_scale": scale_NG}
        if not is_symmetric:
            zeros_NG = torch.randint(-half, half, (n, num_groups))
            # Packed along the outputs, not along the groups.
            packed = pack_offset(zeros_NG.T, bits).T.contiguous()
            parts["weight_zero_point"] = packed if is_packed else zeros_NG.to(torch.int8)
        if is_packed:
            parts |= {
                "weight_packed": pack_offset(values_NK, bits),
                "weight_shape": torch.tensor([n, k]),
            }
        else:
            parts["weight"] = values_NK.to(torch.int8)
        if is_shuffled:
            parts["weight_g_idx"] = groups_K.to(torch.int32)
        product_NK = (values_NK - zeros_NG[:, groups_K]) * scale_NG[:, groups_K].float()
        return StoredMatrix(parts, _rounded(product_NK, scale_dtype))

    return store


def gptq(
    bits: int,
    group_size: int,
    *,
    is_symmetric: bool = True,
    is_shuffled: bool = False,
    zero_shift: int = 1,
    has_zero_bias: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Form:
    """Returns GPTQ weights. `zero_shift` is subtracted from each stored zero. Some tools store
    biases that are all 0."""

    def store(n: int, k: int) -> StoredMatrix:
        groups_K, num_groups = _groups(k, group_size, is_shuffled)
        values_KN = torch.randint(0, 2**bits, (k, n))
        zeros_GN = torch.full((num_groups, n), 2 ** (bits - 1))
        if not is_symmetric:
            zeros_GN = torch.randint(0, 2**bits, (num_groups, n))
        scale_GN = _scales((num_groups, n), 0.6 / 2**bits).to(scale_dtype)
        parts = {
            "qweight": pack_rows(values_KN, bits),
            "qzeros": pack_columns((zeros_GN - zero_shift) % 2**bits, bits),
            "scales": scale_GN,
            "g_idx": groups_K.to(torch.int32),
        }
        if has_zero_bias:
            parts["bias"] = torch.zeros(n, dtype=torch.float16)
        product_KN = (values_KN - zeros_GN[groups_K]) * scale_GN[groups_K].float()
        return StoredMatrix(parts, _rounded(product_KN.T.contiguous(), scale_dtype))

    return store


def awq(group_size: int, scale_dtype: torch.dtype = torch.float16) -> Form:
    def store(n: int, k: int) -> StoredMatrix:
        groups_K, num_groups = _groups(k, group_size, False)
        values_KN, zeros_GN = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (num_groups, n))
        scale_GN = _scales((num_groups, n), 0.04).to(scale_dtype)
        parts = {"qweight": pack_awq(values_KN), "qzeros": pack_awq(zeros_GN), "scales": scale_GN}
        product_KN = (values_KN - zeros_GN[groups_K]) * scale_GN[groups_K].float()
        return StoredMatrix(parts, _rounded(product_KN.T.contiguous(), scale_dtype))

    return store


def mxfp4(k: int, n: int) -> StoredMatrix:
    """Returns blocks of 32 inputs; the weight of fused experts is [K, N]."""
    codes_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    exponents_NG = torch.randint(121, 125, (n, k // 32), dtype=torch.uint8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values_NK = torch.cat((values, -values))[codes_NK.long()]
    scales_NK = torch.exp2(exponents_NG.float() - 127).repeat_interleave(32, dim=1)
    blocks = (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).unflatten(1, (-1, 16))
    parts = {"weight_blocks": blocks, "weight_scales": exponents_NG}
    return StoredMatrix(parts, (values_NK * scales_NK).T.contiguous())


def _scales(shape: tuple[int, ...], mean: float) -> Tensor:
    return (torch.rand(shape) + 0.5) * mean


def _groups(num_inputs: int, group_size: int, is_shuffled: bool) -> tuple[Tensor, int]:
    """Returns the group of each input, and the number of groups."""
    size = num_inputs if group_size == -1 else group_size
    groups_K = torch.arange(num_inputs) // size
    num_groups = int(groups_K[-1]) + 1
    return groups_K[torch.randperm(num_inputs)] if is_shuffled else groups_K, num_groups


def _rounded(product_NK: Tensor, dtype: torch.dtype | None) -> Tensor:
    return product_NK if dtype is None else product_NK.to(dtype).float()
