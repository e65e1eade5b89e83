"""The shape of a model's attention, the queries and keys of one step, and the attention plan of a
recorded step.

A plan of one step (`Kernels.plan_attention`) has the sizes of that step. A recorded one, a
`FixedAttention`, has those of a `DecodeRoom`: its launches and its addresses stay, only what lies
there changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.graphs.graph_sizes import GraphSize

QKNorm = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention of one layer.

    `qk_norm`: none, over each head, or over the whole row; before the rotation or after it.
    `clip`: bound of q, k and v. The first `rotary_dim` values of a head are rotated (None: all).
    A query sees the last `sliding_window` keys, or those of its own chunk of `chunk` positions.
    `softmax_scale` None stands for head_dim^-0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # None: head_dim
    rotary_dim: int | None = None
    qk_norm: QKNorm = "none"
    is_norm_after_rotation: bool = False
    norm_eps: float = 1e-6
    clip: float | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    softmax_scale: float | None = None
    has_sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def num_rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are up-projections of one
    latent per token, and one rotated key is shared by all heads.

    Here the up-projections are absorbed: a query is projected into the latent space, attends to the
    latents themselves, and the weighted latent is projected to the head's value. So the cache holds
    `latent_dim + rope_dim` values per token and layer, whatever the number of heads.
    """

    num_heads: int
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int
    value_dim: int
    latent_dim: int
    query_rank: int | None  # width of the query's own latent; None: projected at once
    norm_eps: float
    softmax_scale: float

    def absorbed(self) -> AttentionShape:
        """Returns the shape of attention over latents: one key head; values are its first part."""
        return AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self.latent_dim + self.rope_dim,
            value_dim=self.latent_dim,
            softmax_scale=self.softmax_scale,
        )


@dataclass(frozen=True, slots=True)
class QKNormWeights:
    """[D] each for the norm over heads, [H * D] and [Hkv * D] for the norm over rows."""

    q: Tensor
    k: Tensor


@dataclass(frozen=True, slots=True)
class StepRows:
    """The query tokens of a step, sequence after sequence. Sequence i has tokens at positions
    [query_starts[i], query_starts[i] + query_lens[i]) and `page_tables[i]` covers them.

    With `drops_keys` these are places among the keys that are left, and the positions by which the
    rows are rotated are larger.
    """

    query_lens: NDArray[np.int64]
    query_starts: NDArray[np.int64]
    page_tables: Sequence[Sequence[int]]
    page_size: int
    drops_keys: bool = False

    @property
    def places(self) -> NDArray[np.int64]:
        """The place of each row among the keys of its sequence, [T]."""
        firsts = np.cumsum(self.query_lens) - self.query_lens
        rows = np.arange(self.query_lens.sum(), dtype=np.int64)
        places: NDArray[np.int64] = rows + np.repeat(self.query_starts - firsts, self.query_lens)
        return places


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos and sin of every position, [P, R] in fp32; the sine of the first half is negated.

    `query_scale` [P] in fp32, if there is one, multiplies the rotated query of each position.
    """

    cos: Tensor
    signed_sin: Tensor
    query_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """Steps of `size.num_rows` sequences with one token each: up to `size.num_keys` keys over all
    of them, and up to `max_positions` of one."""

    size: GraphSize
    max_positions: int
    page_size: int


class FixedAttention(Protocol):
    """One attention shape of a recorded step."""

    @property
    def plan(self) -> Any:
        """The plan for `Kernels.attend`, as loaded last."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that a recording reads; they must keep their addresses."""
        ...

    def pack(self, step: StepRows) -> Any:
        """Lays a step out on the host. It has exactly the room's sequences."""
        ...

    def load(self, packed: Any) -> None:
        """Lets the plan be that step's, in place and without waiting for a device."""
        ...


class ReplannedAttention:
    """Implements FixedAttention for kernels that plan each step on the host and are never captured:
    another step is another plan."""

    def __init__(self, plan_step: Callable[[StepRows], Any]) -> None:
        self._plan_step = plan_step
        self.plan: Any = None
        self.tensors: tuple[Tensor, ...] = ()

    def pack(self, step: StepRows) -> Any:
        return self._plan_step(step)

    def load(self, packed: Any) -> None:
        self.plan = packed
