"""Kernels in plain torch: any device, no compiler. The reference set, and the fallback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moe_kernels.interface.adapters import Rest, RowAdditions, no_rest
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    DecodeRoom,
    LatentShape,
    QKNormWeights,
    ReplannedAttention,
    RotaryTable,
    StepRows,
)
from moe_kernels.interface.head_drafting import DraftingParts
from moe_kernels.interface.kernels import (
    AttentionCall,
    ExpertBank,
    ExpertWeights,
    GatedActivation,
    Linear,
    SplitMLP,
)
from moe_kernels.interface.layer_front import LayerFrontParts
from moe_kernels.interface.layer_stack import StackParts
from moe_kernels.interface.quantised_matrix import (
    LowBitProducts,
    MatrixForm,
    PackedLayout,
    Weight,
)
from moe_kernels.interface.routing import RouterShape, route
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix
from moe_kernels.reference.expert_mlp import ExpertMLP, QuantisedMLP, made_mlp, routed_experts
from moe_kernels.reference.linear import make_linear
from moe_kernels.reference.low_bit_linear import AnyLinear, made_linear
from moe_kernels.reference.norm import rms_norm, rotate
from moe_kernels.reference.paged_attention import AttentionPlan, paged_attention, plan_attention
from moe_kernels.reference.signed_products import TorchExpertSigns, TorchSignedLinear
from moe_kernels.reference.torch_adapters import TorchAdapterKernels, added_sums
from moe_kernels.reference.torch_kv_rows import page_rows, rotated, store_rows


class TorchExperts:
    """Implements ExpertBank: one MLP per activated expert."""

    def __init__(self, experts: Sequence[ExpertMLP | QuantisedMLP | None]) -> None:
        self._experts = list(experts)

    def __call__(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.partial(x_TD, expert_ids_TK, weights_TK).float()

    def partial(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return routed_experts(x_TD, expert_ids_TK, weights_TK, self._experts)

    def added_partial(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, added: RowAdditions
    ) -> Tensor:
        """Implements AddingBank."""
        return added_sums(self._experts, x_TD, expert_ids_TK, weights_TK, added)


class TorchHeadLinear:
    """Implements HeadLinear: one linear per head."""

    def __init__(self, weight_HNK: Tensor) -> None:
        self._heads = [make_linear(weight_NK.contiguous()) for weight_NK in weight_HNK]

    def __call__(self, x_THK: Tensor) -> Tensor:
        inputs = x_THK.transpose(0, 1).contiguous()
        outputs = [head(x_TK) for head, x_TK in zip(self._heads, inputs, strict=True)]
        return torch.stack(outputs, dim=1)


class TorchRouterLinear:
    """Implements RouterLinear: an fp32 linear."""

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        bias_E = None if bias_E is None else bias_E.float()
        self._linear = make_linear(weight_ED.float(), bias_E)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._linear(x_TD.float())


class TorchKernels:
    """Implements Kernels."""

    has_own_threads = False
    least_page_size = 1
    can_be_captured = False  # experts are looped over on the host
    can_split_columns = False  # oneDNN and MKL choose sums by the shape

    def __init__(self, name: str = "torch", low_bit_products: LowBitProducts = "exact") -> None:
        self.name, self._products = name, low_bit_products
        self.adapters = TorchAdapterKernels()
        # Exact products are made of floats. Products with quantised rows need few bits.
        self.has_packed_products = self.has_packed_linears = low_bit_products == "int8"

    def packed_layout(self, form: MatrixForm) -> PackedLayout:
        """Returns the layout in the checkpoint."""
        is_int8 = self._products == "int8" and form.can_quantise_rows
        return PackedLayout(f"{form.name} x int8" if is_int8 else form.name, form.bits)

    def linear_layout(self, form: MatrixForm) -> PackedLayout:
        return self.packed_layout(form)

    def linear(self, weight_NK: Weight, bias_N: Tensor | None = None) -> AnyLinear:
        return made_linear(weight_NK, bias_N, self._products)

    def head_linear(self, weight_HNK: Tensor) -> TorchHeadLinear:
        return TorchHeadLinear(weight_HNK)

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> TorchRouterLinear:
        return TorchRouterLinear(weight_ED, bias_E)

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> ExpertBank:
        products = self._products
        return TorchExperts(
            [None if e is None else made_mlp(e, activation, products) for e in experts]
        )

    def expert_slots(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> TorchSlots:
        return TorchSlots(sample, activation, max_bytes, most, self._products)

    def split_mlp(self, weights: ExpertWeights, activation: GatedActivation) -> SplitMLP:
        raise AssertionError(f"{self.name} does not split columns")

    def signed_linear(self, base: Linear, added: SignMatrix) -> TorchSignedLinear:
        return TorchSignedLinear(base, added)

    def expert_signs(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> TorchExpertSigns:
        return TorchExpertSigns(added, is_changed_E)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def plan_attention(
        self, step: StepRows, shape: AttentionShape, device: torch.device
    ) -> AttentionPlan:
        return plan_attention(step, shape, device)

    def fixed_attention(
        self, room: DecodeRoom, shape: AttentionShape, device: torch.device
    ) -> ReplannedAttention:
        return ReplannedAttention(lambda step: plan_attention(step, shape, device))

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        sinks_H: Tensor | None,
        call: AttentionCall[AttentionPlan],
        shape: AttentionShape,
    ) -> Tensor:
        q_THD, k_THD, v_THD = _split(qkv, norm, shape)
        q_THD, k_THD = (_rotate(x, call.rotary, call.positions) for x in (q_THD, k_THD))
        if norm is not None and shape.is_norm_after_rotation:
            q_THD, k_THD = _norm_heads(q_THD, k_THD, norm, shape)
        if call.rotary.query_scale is not None:
            q_THD = q_THD * call.rotary.query_scale[call.positions][:, None, None]
        out = self.over_keys(q_THD, k_THD, v_THD, call, shape.scale, sinks_H)
        return out.flatten(1).to(qkv.dtype)

    def over_keys(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGV: Tensor | None,
        call: AttentionCall[AttentionPlan],
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Stores new keys and values (of G heads; None: the keys' first part) in the pages, and
        attends to all of each sequence -> [T, H, Dv] in fp32."""
        new_keys = k_TGD.reshape(-1, k_TGD.shape[-1]).float()
        new_values = None if v_TGV is None else v_TGV.reshape(-1, v_TGV.shape[-1]).float()
        store_rows(call.pages, new_keys, new_values, call.kv_rows)
        if v_TGV is not None:
            q_THD = rotated(q_THD, call.pages.form.rotation(k_TGD.shape[-1]))
        return paged_attention(q_THD, *page_rows(call.pages), call.plan, scale, sinks_H)

    def attend_latent(
        self,
        q_latent_THL: Tensor,
        q_rope_THR: Tensor,
        latent_TC: Tensor,
        norm_weight_L: Tensor,
        call: AttentionCall[AttentionPlan],
        shape: LatentShape,
    ) -> Tensor:
        latent, key = latent_TC.split([shape.latent_dim, shape.rope_dim], dim=-1)
        latent = rms_norm(latent.contiguous(), norm_weight_L, shape.norm_eps)
        key = _rotate(key[:, None], call.rotary, call.positions)[:, 0]
        keys = torch.cat((latent.float(), key), -1)[:, None]
        q_rope = _rotate(q_rope_THR, call.rotary, call.positions)
        q = torch.cat((q_latent_THL.float(), q_rope), -1)
        return self.over_keys(q, keys, None, call, shape.softmax_scale).to(latent.dtype)

    def route(
        self, logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return route(logits_TE, shape, selection_bias_E)

    def layer_front(self, parts: LayerFrontParts) -> None:
        return None

    def layer_stack(self, parts: StackParts) -> None:
        return None

    def largest(self, x_RN: Tensor) -> tuple[list[float], list[int]]:
        values_R, places_R = x_RN.max(dim=-1)
        return values_R.tolist(), places_R.tolist()

    def rank_calls(self) -> None:
        return None

    def drafting(self, parts: DraftingParts) -> None:
        return None

    def for_drafts(self) -> None:
        return None

    def token_sampler(self) -> None:
        return None

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None) -> Tensor:
        if more_TD is not None:
            out_TD = out_TD + more_TD
        return hidden_TD + out_TD.to(hidden_TD.dtype)


def _split(
    qkv: Tensor, norm: QKNormWeights | None, shape: AttentionShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits, norms and clips -> q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv]."""
    dim, heads, kv_heads = shape.head_dim, shape.num_heads, shape.num_kv_heads
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * shape.value_width], dim=-1)
    if norm is not None and shape.qk_norm == "row":
        q = rms_norm(q.contiguous(), norm.q, shape.norm_eps)
        k = rms_norm(k.contiguous(), norm.k, shape.norm_eps)
    if shape.clip is not None:
        q, k, v = (t.clamp(-shape.clip, shape.clip) for t in (q, k, v))
    q, k = (t.reshape(len(qkv), -1, dim) for t in (q, k))
    v = v.reshape(len(qkv), kv_heads, shape.value_width)
    if norm is not None and shape.qk_norm == "head" and not shape.is_norm_after_rotation:
        q, k = _norm_heads(q, k, norm, shape)
    return q, k, v


def _norm_heads(
    q: Tensor, k: Tensor, norm: QKNormWeights, shape: AttentionShape
) -> tuple[Tensor, Tensor]:
    return rms_norm(q, norm.q, shape.norm_eps), rms_norm(k, norm.k, shape.norm_eps)


def _rotate(x_THD: Tensor, rotary: RotaryTable, positions: Tensor) -> Tensor:
    """Rotates the first values of each head, as many as the table has -> fp32."""
    cos, sin = rotary.cos[positions][:, None], rotary.signed_sin[positions][:, None]
    width = cos.shape[-1]
    if width == x_THD.shape[-1]:
        return rotate(x_THD, cos, sin)
    rotated = rotate(x_THD[..., :width], cos, sin)
    return torch.cat((rotated, x_THD[..., width:].float()), dim=-1)


class TorchSlots:
    """Implements ExpertSlots. Overwritten experts are freed, so it never holds more than asked for.

    A slot counts as the bytes of its matrices; packed by oneDNN they are about as many.
    """

    def __init__(
        self,
        sample: ExpertWeights,
        activation: GatedActivation,
        max_bytes: int,
        most: int,
        products: LowBitProducts = "exact",
    ) -> None:
        self._products = products
        self.slot_bytes = sample.num_bytes
        self.num_slots = min(most, max_bytes // self.slot_bytes)
        self._activation = activation
        self._slots: list[ExpertMLP | QuantisedMLP | None] = [None] * self.num_slots

    def write(self, slot: int, weights: ExpertWeights) -> None:
        self._slots[slot] = None  # what was there goes first
        self._slots[slot] = made_mlp(weights, self._activation, self._products)

    def bank(self, num_experts: int) -> TorchSlotBank:
        return TorchSlotBank(self._slots, num_experts)


class TorchSlotBank(TorchExperts):
    """Implements SlotBank. The experts change."""

    def __init__(self, slots: list[ExpertMLP | QuantisedMLP | None], num_experts: int) -> None:
        super().__init__([None] * num_experts)
        self._slots = slots

    def point(self, expert: int, slot: int | None) -> None:
        self._experts[expert] = None if slot is None else self._slots[slot]
