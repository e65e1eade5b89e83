"""The interface of a set of kernels. One set is chosen at load and passed down.

T rows, D model width, H query heads, Hkv key/value heads, E experts, K top-k. In every set, a
row's result depends on that row alone (see docs/internals/numerics.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from moe_kernels.interface.adapters import AdapterKernels, RowAdditions
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    DecodeRoom,
    FixedAttention,
    LatentShape,
    QKNormWeights,
    RotaryTable,
    StepRows,
)
from moe_kernels.interface.head_drafting import DraftingParts, HeadDrafting
from moe_kernels.interface.kv_form import KVPages
from moe_kernels.interface.layer_front import LayerFront, LayerFrontParts
from moe_kernels.interface.layer_stack import LayerStack, StackParts
from moe_kernels.interface.quantised_matrix import MatrixForm, PackedLayout, Weight
from moe_kernels.interface.rank_kernels import RankKernels
from moe_kernels.interface.routing import RouterShape
from moe_kernels.interface.token_sampler import TokenSampler


class Linear(Protocol):
    """x [T, K] -> x W^T + bias (+ residual) [T, N], in the weight's dtype."""

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor: ...


class HeadLinear(Protocol):
    """x [T, H, K] -> each head's own x W^T [T, H, N], contiguous, in the weight's dtype."""

    def __call__(self, x_THK: Tensor) -> Tensor: ...


class RouterLinear(Protocol):
    """x [T, D] -> logits [T, E] in fp32, not rounded to the model's dtype on the way."""

    def __call__(self, x_TD: Tensor) -> Tensor: ...


class ExpertBank(Protocol):
    """One layer's experts, or those of them that are here.

    Rows, ids (-1: an expert elsewhere, which adds nothing) and weights -> the rows' weighted sums.
    The sum does not depend on the order of its terms, nor on how experts lie on banks
    (expert_mlp.combine_choices is the definition).
    """

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the sum [T, D], rounded to fp32."""
        ...

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Returns the sum [T, D] in fp64, to be added to other banks' and then rounded once."""
        ...


class SlotBank(ExpertBank, Protocol):
    """A layer's bank whose experts lie in slots, and come and go. None is there at first."""

    def point(self, expert: int, slot: int | None) -> None:
        """An expert lies in a slot from now on; None: it is gone, and no row may choose it."""
        ...


class ExpertSlots(Protocol):
    """Memory for some experts, of any layer: all are of the same forms and sizes."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of one packed expert."""
        ...

    def write(self, slot: int, weights: ExpertWeights) -> None:
        """Packs an expert into a slot that no bank points to. Threads may write to several."""
        ...

    def bank(self, num_experts: int) -> SlotBank:
        """Makes a layer's bank."""
        ...


class SplitMLP(Protocol):
    """Computes some columns of an MLP's hidden layer and of its output, with the bits of an
    ExpertBank of the whole MLP. `added`: additions to the same columns."""

    def hidden(self, x_TD: Tensor, added: RowAdditions | None = None) -> Tensor:
        """-> the hidden layer's columns that are here, in x's dtype."""
        ...

    def output(
        self, hidden_TF: Tensor, weights_T1: Tensor, added: RowAdditions | None = None
    ) -> Tensor:
        """The whole hidden layer -> the output's columns that are here, weighed, in fp32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation:
    """hidden = g sigmoid(alpha g) (u + up_offset), with g = min(gate, limit) and u = up within
    [-limit, limit]. The defaults are SwiGLU; GPT-OSS has alpha 1.702, limit 7, offset 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up are [F, D], down is [D, F]; biases [F], [F], [D], all or none.

    Gate and up are both tensors, or both quantised matrices of one form; down may be another.
    """

    gate: Weight
    up: Weight
    down: Weight
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the weights as they are stored: in few bits, with their scales."""
        parts = (self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        return sum(0 if part is None else part.nbytes for part in parts)


Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class AttentionCall(Generic[Plan]):
    """The positions of one attention's rows, and the places of their keys and values."""

    rotary: RotaryTable
    positions: Tensor  # int64 [T]
    kv_rows: Tensor  # int64: the rows of the pages that new keys and values are written to
    pages: KVPages
    plan: Plan  # the kernel set's own, from `plan_attention` or `fixed_attention`


class Kernels(Protocol):
    """A set of kernels for one device and dtype. `AttentionPlan` is the set's own type."""

    @property
    def name(self) -> str: ...

    @property
    def has_own_threads(self) -> bool:
        """True if torch's threads are idle while these kernels run (see choose_kernels)."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """True if a step never waits for the device and never reads its numbers on the host: then
        it may become a CUDA graph, with the plans that `fixed_attention` makes."""
        ...

    @property
    def least_page_size(self) -> int:
        """The fewest tokens that a KV page may hold; a power of two."""
        ...

    @property
    def has_packed_products(self) -> bool:
        """True if packed matrices are multiplied as they are, not dequantised in every call."""
        ...

    @property
    def has_packed_linears(self) -> bool:
        """The same of linear layers."""
        ...

    @property
    def adapters(self) -> AdapterKernels:
        """Returns the kernels that serve adapters."""
        ...

    @property
    def can_split_columns(self) -> bool:
        """True if a value of a product does not depend on the number of values computed with it:
        then a layer's columns may be shared out, and no bit changes."""
        ...

    def packed_layout(self, form: MatrixForm) -> PackedLayout | str:
        """Returns how `experts` would hold quantised matrices of this form, or why it cannot."""
        ...

    def linear_layout(self, form: MatrixForm) -> PackedLayout | str:
        """Returns how `linear` would hold a quantised matrix of this form, or why it cannot."""
        ...

    def linear(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Linear:
        """Makes a linear layer; the weight may be repacked, and need not be kept by the caller.

        A quantised matrix is of a form for which `linear_layout` has given a layout.
        """
        ...

    def head_linear(self, weight_HNK: Tensor) -> HeadLinear:
        """Makes a layer of one matrix per head."""
        ...

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> RouterLinear:
        """Makes a router's projection."""
        ...

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> ExpertBank:
        """Makes a layer's bank; None stands for an expert that lives elsewhere.

        All experts are of the same forms, for which `packed_layout` has given a layout.
        """
        ...

    def expert_slots(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> ExpertSlots:
        """Memory for experts such as `sample`: as many as fit into `max_bytes`, at most `most`."""
        ...

    def split_mlp(self, weights: ExpertWeights, activation: GatedActivation) -> SplitMLP:
        """Makes a part of an MLP: gate and up are [some of F, D], down is [some of D, F], and so
        are the biases. Only where `can_split_columns`."""
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) rounded to x's dtype, times weight."""
        ...

    def plan_attention(self, step: StepRows, shape: AttentionShape, device: torch.device) -> Any:
        """Works out once per step what the attention of every layer of this shape needs."""
        ...

    def fixed_attention(
        self, room: DecodeRoom, shape: AttentionShape, device: torch.device
    ) -> FixedAttention | None:
        """Returns a plan for any decode step that the room holds; None: not for this room."""
        ...

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        sinks_H: Tensor | None,
        call: AttentionCall[Any],
        shape: AttentionShape,
    ) -> Tensor:
        """Norm, clip, rotate, store keys and values, attend: [T, (H + 2 Hkv) D] -> [T, H D].

        `qkv` may be overwritten. `call.kv_rows` [T * Hkv]: rows of the pages seen as [.., D].
        `sinks_H` in fp32: a logit of each head that takes part in the softmax and has no value.
        """
        ...

    def attend_latent(
        self,
        q_latent_THL: Tensor,
        q_rope_THR: Tensor,
        latent_TC: Tensor,
        norm_weight_L: Tensor,
        call: AttentionCall[Any],
        shape: LatentShape,
    ) -> Tensor:
        """Norm the new latents, rotate queries and the shared key, store, attend -> [T, H, L].

        `latent_TC`: C = L + R, the latent and then the shared key. `call.kv_rows` [T].
        """
        ...

    def route(
        self, logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> ids (int64, ascending in a row) and weights (fp32), [T, K] each. All input fp32."""
        ...

    def layer_front(self, parts: LayerFrontParts) -> LayerFront | None:
        """Returns the parts as one call, with the same results bit for bit; None: not in this
        set."""
        ...

    def layer_stack(self, parts: StackParts) -> LayerStack | None:
        """Returns all layers as one call, with the same results bit for bit; None: not in this
        set."""
        ...

    def rank_calls(self) -> RankKernels | None:
        """Returns what ranks do between two messages as one call, with the same results bit for
        bit; None: not in this set."""
        ...

    def largest(self, x_RN: Tensor) -> tuple[list[float], list[int]]:
        """Returns the largest value of each fp32 row, and the first place that has it. A row with a
        NaN has the value NaN, and any place."""
        ...

    def drafting(self, parts: DraftingParts) -> HeadDrafting | None:
        """Returns the head as one call, with the same tokens; None: not in this set."""
        ...

    def for_drafts(self) -> Kernels | None:
        """Returns a kernel set for networks that only guess. It rounds rows to int8 for matrices in
        int8, which is several times faster. None: this set has no faster products."""
        ...

    def token_sampler(self) -> TokenSampler | None:
        """Sampling on the device; None: the engine samples with torch operations."""
        ...

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None) -> Tensor:
        """hidden + (out + more) rounded to hidden's dtype; `out` and `more` are fp32."""
        ...
