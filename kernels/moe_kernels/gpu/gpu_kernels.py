"""The Triton set: every kernel of this folder behind the one protocol, for CUDA devices.

T rows, D model width, H query heads, L latent width. There is no fused layer front: a step is a
few dozen launches per layer, none of which waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from moe_kernels.gpu.expert_bank import GroupedExpertBank, GroupedSlots, stacked_experts
from moe_kernels.gpu.grouped_gemm import api, grouped_linear
from moe_kernels.gpu.grouped_gemm.api import Chip, chip_of
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.from_matrix import layout_of
from moe_kernels.gpu.grouped_gemm.grouped_linear import (
    GroupedHeadLinear,
    GroupedLinear,
    GroupedRouterLinear,
    RowTiles,
)
from moe_kernels.gpu.grouped_gemm.pack import plain
from moe_kernels.gpu.heads.api import shape_latent, shape_qkv
from moe_kernels.gpu.paged_attention.api import attention, plan_attention, plan_room
from moe_kernels.gpu.paged_attention.launch_plan import PagedPlan
from moe_kernels.gpu.router.api import route
from moe_kernels.gpu.rows.api import Addends, add, rms_norm
from moe_kernels.gpu.sampling.gpu_sampler import GpuTokenSampler
from moe_kernels.gpu.signs.api import GpuExpertSigns, GpuSignedLinear
from moe_kernels.gpu.signs.step_rows import GpuAdapterKernels, untuned
from moe_kernels.interface.adapters import Rest, no_rest
from moe_kernels.interface.attention_shape import (
    AttentionShape,
    DecodeRoom,
    LatentShape,
    QKNormWeights,
    StepRows,
)
from moe_kernels.interface.head_drafting import DraftingParts
from moe_kernels.interface.kernels import (
    AttentionCall,
    ExpertWeights,
    GatedActivation,
    Linear,
    SplitMLP,
)
from moe_kernels.interface.layer_front import LayerFrontParts
from moe_kernels.interface.layer_stack import StackParts
from moe_kernels.interface.quantised_matrix import (
    MatrixForm,
    PackedLayout,
    Weight,
    only_floats,
)
from moe_kernels.interface.routing import RouterShape
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix

# What the interpreter, which computes on the CPU, is told to be. No tile size may be chosen by the
# batch there: numpy's products do not treat rows alike.
_INTERPRETED = Chip(capability=90, num_processors=4, has_equal_tiles=False, has_fp8=False)


class TritonKernels:
    """Implements Kernels. Linears are grouped products too, so that every row keeps its bits."""

    has_own_threads = False
    least_page_size = 1
    has_packed_products = True
    has_packed_linears = False
    can_be_captured = True
    can_split_columns = False  # not checked on a card yet

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._is_interpreted = device.type != "cuda"
        self._chip = _INTERPRETED if self._is_interpreted else chip_of(device)
        self._tiles = RowTiles(device)
        self.adapters = GpuAdapterKernels(device)
        self._answers: dict[Hashable, bool] = {}
        self._asking = threading.Lock()
        where = f"in the interpreter on {device}"
        if not self._is_interpreted:
            where = f"on {torch.cuda.get_device_name(device)}"
        self.name = f"triton {triton.__version__} ({where}, attention: triton)"

    def packed_layout(self, form: MatrixForm) -> PackedLayout | str:
        return layout_of(form)

    def linear_layout(self, form: MatrixForm) -> str:
        return "the triton kernels hold linear layers in floats"

    def linear(self, weight_NK: Weight, bias_N: Tensor | None = None) -> GroupedLinear:
        weight_NK = only_floats(weight_NK)
        return self._linear(weight_NK, bias_N, weight_NK.dtype)

    def head_linear(self, weight_HNK: Tensor) -> GroupedHeadLinear:
        weight = plain(weight_HNK, 1)
        made = GroupedHeadLinear(weight, self._tiles, self._chip)
        num_heads, _, num_inputs = weight_HNK.shape
        made.chip = self._asked(made, weight_HNK, (num_heads, num_inputs))
        return made

    def router_linear(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> GroupedRouterLinear:
        """Keeps the weight in the model's dtype if that holds it exactly: products of two such
        numbers are exact in fp32, so only fp32's sum is rounded, as if all had been converted
        before."""
        lowered_ED = weight_ED.to(self._dtype)
        is_exact = torch.equal(lowered_ED.float(), weight_ED.float())
        weight_ED = lowered_ED if is_exact else weight_ED.float()
        return GroupedRouterLinear(self._linear(weight_ED, bias_E, torch.float32))

    def _linear(
        self, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
    ) -> GroupedLinear:
        weight = plain(weight_NK[None], 1)
        made = GroupedLinear(weight, bias_N, self._tiles, self._chip, out_dtype)
        made.chip = self._asked(made, weight_NK, (weight.num_inputs,))
        return made

    def _asked(
        self, made: GroupedLinear | GroupedHeadLinear, weight: Tensor, widths: tuple[int, ...]
    ) -> Chip:
        """Returns the chip with its self-check for linear layers of this shape."""

        def ask() -> bool:
            rows = grouped_linear.checked_rows(*widths, dtype=weight.dtype, device=weight.device)
            return grouped_linear.has_equal_tiles(made, rows)

        return self._chip_for((weight.shape, weight.dtype), ask)

    def _chip_for(self, key: Hashable, ask: Callable[[], bool]) -> Chip:
        """Asks the chip once for weights of this shape; layers may be loaded by many threads."""
        if self._is_interpreted:
            return self._chip
        with self._asking:
            if key not in self._answers:
                self._answers[key] = ask()
            return replace(self._chip, has_equal_tiles=self._answers[key])

    def signed_linear(self, base: Linear, added: SignMatrix) -> GpuSignedLinear:
        return GpuSignedLinear(base, added, self._tiles)

    def expert_signs(
        self, added: Mapping[int, SignedExpert], is_changed_E: Tensor, rest: Rest = no_rest
    ) -> GpuExpertSigns:
        return GpuExpertSigns(added, is_changed_E)

    def experts(
        self, experts: Sequence[ExpertWeights | None], activation: GatedActivation
    ) -> GroupedExpertBank:
        stacked, places_E = stacked_experts(experts, activation)
        return GroupedExpertBank(stacked, places_E, self._chip_of(stacked))

    def expert_slots(
        self, sample: ExpertWeights, activation: GatedActivation, max_bytes: int, most: int
    ) -> GroupedSlots:
        slots = GroupedSlots(sample, activation, max_bytes, most)
        slots.chip = self._chip_of(slots.stacked)
        return slots

    def _chip_of(self, stacked: GroupedExperts) -> Chip:
        """Returns the chip with its self-check for experts of this shape."""
        gate_up, down = (
            (weight.weight_format, weight.group, weight.values.shape)
            for weight in (stacked.gate_up, stacked.down)
        )
        return self._chip_for(
            (gate_up, down, stacked.activation),
            lambda: api.has_equal_tiles(stacked, self._dtype, self._chip),
        )

    def split_mlp(self, weights: ExpertWeights, activation: GatedActivation) -> SplitMLP:
        raise AssertionError(f"{self.name} does not split columns")

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return rms_norm(x_TD, weight_D, eps)

    def plan_attention(
        self, step: StepRows, shape: AttentionShape, device: torch.device
    ) -> PagedPlan:
        return plan_attention(step, shape, self._dtype, device)

    def fixed_attention(
        self, room: DecodeRoom, shape: AttentionShape, device: torch.device
    ) -> PagedPlan | None:
        return plan_room(room, shape, self._dtype, device)

    def attend(
        self,
        qkv: Tensor,
        norm: QKNormWeights | None,
        sinks_H: Tensor | None,
        call: AttentionCall[Any],
        shape: AttentionShape,
    ) -> Tensor:
        pages, (plan, groups) = call.pages, untuned(call.plan)
        q_THD = shape_qkv(qkv, norm, call.rotary, call.positions, call.kv_rows, pages, shape)
        for rows, (q_norm, k_norm) in groups:  # replaces what the base model's norms wrote
            assert q_norm is not None and k_norm is not None, "norms of both"
            positions, kv_rows = _places(call, rows)
            own = QKNormWeights(q_norm, k_norm)
            own_RHD = shape_qkv(qkv[rows], own, call.rotary, positions, kv_rows, pages, shape)
            q_THD.index_copy_(0, rows, own_RHD)
        out_THV = attention(q_THD, pages, plan, shape, sinks_H)
        return out_THV.flatten(1).to(qkv.dtype)

    def attend_latent(
        self,
        q_latent_THL: Tensor,
        q_rope_THR: Tensor,
        latent_TC: Tensor,
        norm_weight_L: Tensor,
        call: AttentionCall[Any],
        shape: LatentShape,
    ) -> Tensor:
        pages, (plan, groups) = call.pages, untuned(call.plan)
        heads, rotary = (q_latent_THL, q_rope_THR, latent_TC), call.rotary
        places = call.positions, call.kv_rows
        q_THC = shape_latent(*heads, norm_weight_L, rotary, *places, pages, shape)
        for rows, (own_L, _) in groups:  # replaces what the base model's norm wrote into the pages
            assert own_L is not None, "a norm of latents"
            q_latent, q_rope, latent = (each[rows] for each in heads)
            where = _places(call, rows)
            shape_latent(q_latent, q_rope, latent, own_L, rotary, *where, pages, shape)
        out_THL = attention(q_THC, pages, plan, plan.shape)
        return out_THL.to(latent_TC.dtype)

    def route(
        self, logits_TE: Tensor, shape: RouterShape, selection_bias_E: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        routed = route(logits_TE, shape, selection_bias_E, has_counts=False)
        return routed.ids_TK, routed.weights_TK

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

    def token_sampler(self) -> GpuTokenSampler:
        return GpuTokenSampler()

    def add(self, hidden_TD: Tensor, out_TD: Tensor, more_TD: Tensor | None) -> Tensor:
        return add(hidden_TD, Addends(out_TD=out_TD, more_TD=more_TD))


def _places(call: AttentionCall[Any], rows_R: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions and the rows of the pages of some rows."""
    by_token = call.kv_rows.view(len(call.positions), -1)
    return call.positions[rows_R], by_token[rows_R].flatten()


def make_triton_kernels(device: torch.device, dtype: torch.dtype) -> TritonKernels:
    """Builds the set for a device that `choice.triton_refusal` accepts."""
    return TritonKernels(device, dtype)
