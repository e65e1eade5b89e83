"""Sampling by a set of kernels: what the engine hands over for a step, and what it gets back.

S rows, M entries (single tokens of single rows), R rows to be scored, N likeliest tokens of each.
All arrays lie on the host: a set moves them to its device at once, and back at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.token_mask import TokenMasks


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
    """What each row asks for."""

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
        """Whether a row that is drawn has min_p, top-k or top-p."""
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
