"""A drafting head as one call: many small products whose cost is mostly in calling them.

S sequences, D model width, V vocabulary, M tokens of a draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Layer = Callable[..., Tensor]  # a Linear or an ExpertBank of the set that computes the head


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBlock:
    """Norm, an MLP (a bank of one expert), and residual."""

    norm_D: Tensor
    mlp: Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingParts:
    """The weights of a drafting head, all in the model's dtype.

    A step makes the next state: norm and `state_in` of the state, plus norm and `token_in` of the
    token's embedding, then the blocks. `output` of the normed state are the logits.
    """

    embedding_VD: Tensor
    state_norm_D: Tensor
    token_norm_D: Tensor
    output_norm_D: Tensor
    state_in: Layer
    token_in: Layer
    blocks: tuple[DraftBlock, ...]
    output: Layer
    norm_eps: float


@dataclass(frozen=True, slots=True)
class Guesses:
    """Tokens guessed in turn, and the probability that the head gives to each. A sequence with
    fewer than M has -1 behind its last one."""

    tokens_SM: Tensor  # int64
    confidences_SM: Tensor  # fp32


class HeadDrafting(Protocol):
    """States [S, D] and tokens [S] (int64) -> at most `most` likeliest tokens in turn.

    A sequence ends before the token with which the product of its confidences falls below `least`.
    """

    def __call__(
        self, state_SD: Tensor, token_ids_S: Tensor, most: int, least: float = 0.0
    ) -> Guesses: ...
