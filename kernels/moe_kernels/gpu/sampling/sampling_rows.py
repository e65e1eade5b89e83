"""The sampling parameters of a step's rows, as tensors on the logits' device, from the caller.

S rows, M entries: single tokens of single rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The parameters of each row's draw.

    The host reads the two flags and skips the kernels that no row needs.

    With CUDA graphs both flags belong to the graph: True, False suit every step.
    """

    temperatures_S: Tensor  # fp32; 0: the likeliest token
    draws_S: Tensor  # fp64 in [0, 1)
    min_ps_S: Tensor  # fp32; 0: off
    top_ks_S: Tensor  # int32; 0: off
    top_ps_S: Tensor  # fp64; 1: off
    has_filter: bool = True  # whether a row may have min_p, top-k or top-p
    is_greedy: bool = False  # whether every row has temperature 0

    def check(self, num_rows: int) -> None:
        """One entry per row, of the kernels' dtypes."""
        expected = {
            "temperatures": (self.temperatures_S, torch.float32),
            "draws": (self.draws_S, torch.float64),
            "min_ps": (self.min_ps_S, torch.float32),
            "top_ks": (self.top_ks_S, torch.int32),
            "top_ps": (self.top_ps_S, torch.float64),
        }
        for name, (tensor, dtype) in expected.items():
            assert tensor.shape == (num_rows,), f"{name} of {num_rows} rows is {tensor.shape}"
            assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustments:
    """Biases and penalties. Each (row, token) occurs once; a bias of -inf bans the token."""

    rows_M: Tensor  # int64
    tokens_M: Tensor  # int64
    biases_M: Tensor  # fp32
    counts_M: Tensor  # int32: how often the answer has the token
    is_seen_M: Tensor  # bool: whether prompt or answer has it
    repetitions_S: Tensor  # fp32; 1: off
    presences_S: Tensor  # fp32; 0: off
    frequencies_S: Tensor  # fp32; 0: off


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One token per row, int64 [S]; `is_valid` [S] is False where a logit is NaN or infinite."""

    tokens_S: Tensor
    is_valid_S: Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The log probability of a token of each row, and its rank from 1 on, int32 [S].

    A logit's log probability is logit - top - log total, in this order and in fp32.
    """

    logprobs_S: Tensor
    ranks_S: Tensor
    tops_S: Tensor  # the row's largest logit
    log_totals_S: Tensor  # of the sum of exp(logit - top)
