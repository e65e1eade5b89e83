"""All layers of a model as one call, with the embedding before them and the head behind them.

S sequences of a step, T tokens, R rows that want logits, D model width, V vocabulary, L layers, Ls
layers with routed experts, K choices per row.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.attention_shape import AttentionShape
from moe_kernels.interface.kv_form import KVPages

CLOCKS = 5  # of a layer, see `StackResult.times`


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One layer: its front, its KV pages, and the banks of its routed experts and of its MLP.

    A dense layer has no routed experts. The MLP of a sparse layer is its shared expert, if any.
    """

    front: Any  # a LayerFront of the same kernels
    shape: AttentionShape
    pages: KVPages
    experts: Any | None  # an ExpertBank of the same kernels
    mlp: Any | None  # a bank of one expert


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts:
    """The weights of a model, and the pages of its cache."""

    embedding_VD: Tensor
    layers: Sequence[StackLayer]
    final_norm_D: Tensor
    head: Any  # a Linear of the same kernels
    norm_eps: float
    logits_divisor: float
    page_size: int
    top_k: int


class StackRows:
    """The tokens of a step as flat arrays of int64, sequence after sequence."""

    __slots__ = ("num_logits", "pages", "slices", "tokens")

    def __init__(self) -> None:
        self.slices, self.tokens, self.pages = array("q"), array("q"), array("q")
        self.num_logits = 0

    def add(
        self,
        start: int,
        token_ids: NDArray[np.int64],
        page_table: Sequence[int],
        num_logits: int,
        num_dropped: int = 0,
    ) -> None:
        """Adds a sequence: tokens at positions from `start` on, the pages that hold them and all
        earlier ones but `num_dropped`, and the number of its last tokens that want logits."""
        self.slices.extend((start, len(token_ids), num_logits, len(page_table), num_dropped))
        self.tokens.frombytes(token_ids.tobytes())
        self.pages.extend(page_table)
        self.num_logits += num_logits


@dataclass(frozen=True, slots=True)
class StackResult:
    """The logits, the residual stream behind the last layer, and what was asked for beside them.

    `times`: of each layer, the nanoseconds since the call began at which it began, its front ended
    (with the MLP of a dense layer), its routed experts, its shared expert, and the sum of all.
    """

    logits_RV: Tensor  # fp32
    hidden_TD: Tensor
    expert_ids_LTK: Tensor | None = None  # int64, of the layers with routed experts
    weights_LTK: Tensor | None = None  # fp32
    times: NDArray[np.int64] | None = None  # [L, CLOCKS]


class LayerStack(Protocol):
    """Computes a step of one micro-batch, with the bits of its layers called one by one."""

    @property
    def at_layer(self) -> int:
        """The layer that is being computed. Safe from any thread."""
        ...

    def __call__(
        self,
        rows: StackRows,
        *,
        has_choices: bool = False,
        has_times: bool = False,
        layers: tuple[int, int] | None = None,
        hidden_TD: Tensor | None = None,
        adapters: Any | None = None,
    ) -> StackResult:
        """`has_choices`: return the routers' choices. `has_times`: return the times of stages.

        `layers`: compute only layers [first, end), from the residual stream before them. There are
        logits only if the last layer is among them. L and Ls of the result count these layers.
        `adapters`: of the rows, from AdapterKernels.rows."""
        ...
