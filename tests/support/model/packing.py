"""Words of packed values, made place by place after each format's published definition.

R rows, C columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_columns(values_RC: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Packs [R, C] numbers below 2^bits -> [R, ceil(C * bits / 32)] int32, the first column lowest.

    `order`: place i of a word holds its column order[i] instead.
    """
    per_word = 32 // bits
    num_words = -(-values_RC.shape[1] // per_word)
    words = torch.zeros(len(values_RC), num_words, dtype=torch.int64)
    for column in range(min(per_word, values_RC.shape[1])):  # of every word
        place = order.index(column) if order else column
        values = values_RC[:, column::per_word].long()
        words[:, : values.shape[1]] |= values << (place * bits)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_rows(values_RC: Tensor, bits: int) -> Tensor:
    """Packs GPTQ's weights: [R, C] -> [R * bits / 32, C], the first row lowest."""
    return pack_columns(values_RC.T, bits).T.contiguous()


def pack_awq(values_RC: Tensor) -> Tensor:
    """Packs [R, C] -> [R, C / 8]: place i holds the column (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    return pack_columns(values_RC, 4, AWQ_ORDER)


def pack_offset(values_RC: Tensor, bits: int) -> Tensor:
    """Packs as compressed-tensors does: signed values with an offset, so that the smallest is 0."""
    return pack_columns(values_RC.long() + 2 ** (bits - 1), bits)
