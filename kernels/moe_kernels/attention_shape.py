"""What attention needs to know of a model, and of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

QKNorm = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """`qk_norm`: none, over each head, or over the whole row. `clip`: bound of q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: QKNorm = "none"
    norm_eps: float = 1e-6
    clip: float | None = None
    sliding_window: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class QKNormWeights:
    """[D] each for the norm over heads, [H * D] and [Hkv * D] for the norm over rows."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The query tokens of a step, sequence after sequence. Sequence i has tokens at positions
    [query_starts[i], query_starts[i] + query_lens[i]) and `page_tables[i]` covers them.
    """

    query_lens: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    page_tables: Sequence[Sequence[int]]
    page_size: int


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, [P, D] in fp32; the sine of the first half is negated."""

    cos: Tensor
    signed_sin: Tensor
