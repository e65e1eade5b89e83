"""Which tokens some rows may take, as bits. C constrained rows of S, V vocabulary, W words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 32  # tokens: bit b of word w is token 32 w + b


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Rows that are not named may take any token; each is named once. On the host."""

    rows_C: NDArray[np.int64]
    bits_CW: NDArray[np.uint32]


# What each byte of a mask adds to its eight tokens.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS == 1, np.float32(0.0), np.float32(-np.inf))


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


def ban_others(logits_SV: Tensor, masks: TokenMasks) -> None:
    """In place, on the host: tokens without a bit get -inf.

    Added, not set: where the model made NaN or infinity, the row still shows it.
    """
    vocab_size = logits_SV.shape[1]
    for row, bits_W in zip(masks.rows_C.tolist(), masks.bits_CW, strict=True):
        penalties = _PENALTIES[bits_W.view(np.uint8)].reshape(-1)[:vocab_size]
        logits_SV[row] += torch.from_numpy(penalties)


def ban_others_on_device(logits_SV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """The same wherever the tensors lie. `bits`: int32."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits_CW.device)
    is_banned = ((bits_CW[:, :, None] >> shifts) & 1).view(len(bits_CW), -1) == 0
    row_CV = logits_SV[rows_C]
    minus_CV = row_CV - float("inf")
    logits_SV[rows_C] = torch.where(is_banned[:, : row_CV.shape[1]], minus_CV, row_CV)
