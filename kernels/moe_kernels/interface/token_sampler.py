"""Sampling by a set of kernels: the engine's input for a step, and the result.

S rows, M entries (single tokens of single rows), R rows to be scored, N likeliest tokens of each,
C constrained rows, V vocabulary, W words of a mask.
All arrays lie on the host: a set moves them to its device in one copy, and back in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD = 32  # tokens: bit b of word w is token 32 w + b
# The penalty that each byte of a mask adds to the logits of its eight tokens.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_PENALTIES = np.where(_BITS == 1, np.float32(0.0), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that some rows may take, as bits, on the host.

    A row is listed at most once; rows that are not listed may take any token.
    """

    rows_C: NDArray[np.int64]
    bits_CW: NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntries:
    """Single tokens of single rows whose logits change; each (row, token) occurs once."""

    rows_M: NDArray[np.int64]
    tokens_M: NDArray[np.int64]
    biases_M: NDArray[np.float32]  # -inf bans the token
    counts_M: NDArray[np.int32]  # how often the answer has it
    is_seen_M: NDArray[np.bool_]  # whether prompt or answer has it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingStep:
    """The sampling parameters of each row."""

    temperatures_S: NDArray[np.float32]  # 0: the likeliest token
    min_ps_S: NDArray[np.float32]  # 0: off
    top_ks_S: NDArray[np.int32]  # 0: off
    top_ps_S: NDArray[np.float64]  # 1: off
    # A row's draw is that of Philox with the key (seed, choice) and the counter position.
    seeds_S: NDArray[np.int64]
    choices_S: NDArray[np.int64]
    positions_S: NDArray[np.int64]
    repetitions_S: NDArray[np.float32]  # 1: off
    presences_S: NDArray[np.float32]  # 0: off
    frequencies_S: NDArray[np.float32]  # 0: off
    entries: TokenEntries | None  # biases, penalties and bans, if a row asks for any
    scored_rows_R: NDArray[np.int64]  # ascending: rows whose log probabilities are wanted
    num_top: int  # the most that a scored row wants
    masks: TokenMasks | None = None  # the tokens that some rows may take

    @property
    def num_rows(self) -> int:
        return len(self.temperatures_S)

    @property
    def is_greedy(self) -> bool:
        return not bool(self.temperatures_S.any())

    @property
    def has_filter(self) -> bool:
        """True if any drawn row has min_p, top-k or top-p."""
        filtered_S = (self.min_ps_S > 0) | (self.top_ks_S > 0) | (self.top_ps_S < 1)
        return bool((filtered_S & (self.temperatures_S > 0)).any())


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Natural log probabilities of chosen tokens, their ranks from 1 on, and the likeliest ones,
    best first and of equal ones the lower id first."""

    logprobs_R: NDArray[np.float32]
    ranks_R: NDArray[np.int32]
    top_ids_RN: NDArray[np.int64]
    top_logprobs_RN: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A token for each row; a row is not valid if its logits hold NaN or infinity."""

    tokens_S: NDArray[np.int64]
    is_valid_S: NDArray[np.bool_]
    scores: ScoredTokens | None  # of the scored rows, if there are any


class TokenSampler(Protocol):
    """Logits are fp32 [S, V] on the set's device, and are left as they are."""

    def sample(self, logits_SV: Tensor, step: SamplingStep) -> SampledStep:
        """Bias and bans, penalties, masks, temperature, min_p, top-k, top-p, draw; scores are the
        model's, before all of these. Waits for the device once, at the end."""
        ...

    def score(self, logits_RV: Tensor, tokens_R: NDArray[np.int64], num_top: int) -> ScoredTokens:
        """Log probabilities of given tokens, and of the likeliest `num_top`."""
        ...


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


def ban_others(logits_SV: Tensor, masks: TokenMasks) -> None:
    """Gives tokens without a bit -inf, in place, on the host.

    -inf is added, not set: a NaN or infinity that the model made stays visible in the row.
    """
    vocab_size = logits_SV.shape[1]
    for row, bits_W in zip(masks.rows_C.tolist(), masks.bits_CW, strict=True):
        penalties = _PENALTIES[bits_W.view(np.uint8)].reshape(-1)[:vocab_size]
        logits_SV[row] += torch.from_numpy(penalties)


def ban_others_on_device(logits_SV: Tensor, rows_C: Tensor, bits_CW: Tensor) -> None:
    """Does the same as `ban_others` on any device. `bits_CW` is int32."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits_CW.device)
    is_banned = ((bits_CW[:, :, None] >> shifts) & 1).view(len(bits_CW), -1) == 0
    row_CV = logits_SV[rows_C]
    minus_CV = row_CV - float("inf")
    logits_SV[rows_C] = torch.where(is_banned[:, : row_CV.shape[1]], minus_CV, row_CV)
