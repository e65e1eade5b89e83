"""The expert MLPs of a layer for a batch: align, two grouped products, weighted sum.

    T rows, K choices, S = T * K slots, P positions, E experts, D model width, F expert width

Nothing waits for the device, and all sizes follow from T: the call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels.gpu.align.api import Alignment, align
from moe_kernels.gpu.grouped_gemm.experts import GroupedExperts
from moe_kernels.gpu.grouped_gemm.heuristics import (
    BLOCK_MS,
    FIXED_BLOCK_M,
    ProductShape,
    TileConfig,
    choose_block_m,
)
from moe_kernels.gpu.grouped_gemm.kernel import combine_kernel, grouped_gemm_kernel
from moe_kernels.gpu.grouped_gemm.kernel_tma import grouped_gemm_tma_kernel
from moe_kernels.gpu.grouped_gemm.pack import GroupedWeight
from moe_kernels.gpu.tuned import TunedTable, load_tuned, tuned_tile
from moe_kernels.interface.kernels import GatedActivation

_COMBINE_BLOCK = 1024
_KNOWN = (100, 90, 80)  # what the heuristics have configurations for
_FIRST_WITH_FP8 = 89
_ROWS, _TOP_K = 96, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The facts of a device that launches need.

    `capability` is 80, 90 or 100. `has_equal_tiles`: all tile sizes give the same bits here
    (the function of that name checks it), so that the batch may choose among them. `tuned`: the
    fastest configurations found on this device.
    """

    capability: int
    num_processors: int
    has_equal_tiles: bool
    has_fp8: bool
    tuned: TunedTable = field(default_factory=TunedTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A grouped product: its weights, and where its rows come from and go.

    Gated: x by row of the batch, out by position, activated. Else x by position, out by slot.
    `added` [S, columns of the weights] fp32 joins the sums of slots whose number in `added_ids` [S]
    is not negative.
    """

    weight: GroupedWeight
    bias: Tensor | None
    x: Tensor
    out: Tensor
    is_gated: bool
    activation: GatedActivation = GatedActivation()
    added: Tensor | None = None
    added_ids: Tensor | None = None


class SlotAdditions(Protocol):
    """The additions of adapters to the choices of a batch."""

    ids_TK: Tensor  # int64, contiguous; -1: nothing is added to this choice

    def gate_up(self, x_TD: Tensor) -> Tensor:
        """Returns what is added to gate and up, fp32 [S, 2 F]."""
        ...

    def down(self, hidden_PF: Tensor, places_S: Tensor) -> Tensor:
        """Returns what is added to the outputs, fp32 [S, D]. `places_S`: the row of hidden of each
        slot with an addition."""
        ...


def grouped_experts(
    x_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    experts: GroupedExperts,
    chip: Chip,
    block_m: int | None = None,
    out_dtype: torch.dtype = torch.float32,
    additions: SlotAdditions | None = None,
) -> Tensor:
    """Returns the rows' weighted sums [T, D] in fp64, or rounded once to fp32.

    An id outside [0, E) adds nothing, also if it has additions. `block_m` forces a tile size.
    """
    (num_rows, top_k), width = expert_ids_TK.shape, experts.width
    assert x_TD.shape == (num_rows, width), f"x {list(x_TD.shape)}, not {[num_rows, width]}"
    assert weights_TK.shape == expert_ids_TK.shape, "one weight for each id"
    assert x_TD.is_contiguous() and weights_TK.is_contiguous(), "x and weights are contiguous"
    num_slots = num_rows * top_k
    out_TD = torch.empty(num_rows, width, dtype=out_dtype, device=x_TD.device)
    if num_slots == 0:
        return out_TD.zero_()
    if block_m is None:
        block_m = choose_block_m(num_slots, experts.num_experts, chip.has_equal_tiles)
        if additions is not None:
            block_m = min(block_m, FIXED_BLOCK_M)  # larger tiles are TMA's, which adds nothing
    alignment = align(expert_ids_TK, experts.num_experts, block_m)
    num_positions = alignment.max_tiles * (1 if alignment.is_direct else block_m)
    hidden_PF = x_TD.new_empty(num_positions, experts.expert_width)
    y_SD = x_TD.new_empty(num_slots, width)
    gate_up = Product(
        weight=experts.gate_up,
        bias=experts.gate_up_bias,
        x=x_TD,
        out=hidden_PF,
        is_gated=True,
        activation=experts.activation,
        added=None if additions is None else additions.gate_up(x_TD),
        added_ids=None if additions is None else additions.ids_TK,
    )
    multiply(gate_up, alignment, top_k, chip)
    down = Product(
        weight=experts.down,
        bias=experts.down_bias,
        x=hidden_PF,
        out=y_SD,
        is_gated=False,
        added=None if additions is None else additions.down(hidden_PF, _places(alignment)),
        added_ids=gate_up.added_ids,
    )
    multiply(down, alignment, top_k, chip)
    _combine(y_SD, expert_ids_TK, weights_TK, out_TD, experts.num_experts)
    return out_TD


def _combine(
    y_SD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, out_TD: Tensor, num_experts: int
) -> None:
    (num_rows, top_k), width = expert_ids_TK.shape, out_TD.shape[1]
    combine_kernel[(num_rows, -(-width // _COMBINE_BLOCK))](
        y_SD,
        expert_ids_TK,
        weights_TK,
        out_TD,
        num_experts,
        width,
        TOP_K=top_k,
        BLOCK_D=_COMBINE_BLOCK,
    )


def _places(alignment: Alignment) -> Tensor:
    """Returns the position of each slot, int64 [S]; 0 for those in no tile.

    Example, S = 3, tiles [1 3 | 2 3]: [0, 0, 2].
    """
    slots_P, num_slots = alignment.sorted_slots, alignment.num_slots
    if slots_P is None:
        return torch.arange(num_slots, device=alignment.tile_experts.device)
    assert alignment.num_tiles is not None, "only a direct alignment has no number of tiles"
    positions_P = torch.arange(len(slots_P), device=slots_P.device)
    is_used_P = positions_P < alignment.num_tiles * alignment.block_rows
    into_P = torch.where(is_used_P, slots_P, num_slots).long()
    places = torch.zeros(num_slots + 1, dtype=torch.int64, device=slots_P.device)
    return places.scatter_(0, into_P, positions_P)[:num_slots]


def product_shape(weight: GroupedWeight, item_bytes: int) -> ProductShape:
    """Returns the quantities by which a tile is chosen."""
    return ProductShape(
        num_inputs=weight.num_inputs,
        num_outputs=weight.num_outputs,
        is_gated=weight.num_parts == 2,
        weight_format=weight.weight_format,
        group=weight.group,
        item_bytes=item_bytes,
    )


def multiply(product: Product, alignment: Alignment, top_k: int, chip: Chip) -> None:
    """Computes one product over aligned tiles; rows in no tile are not written."""
    shape = product_shape(product.weight, product.x.element_size())
    tile = tuned_tile(alignment.block_rows, shape, chip.capability, chip.tuned)
    # One slot a tile leaves nothing to share: the plain grid serves it.
    if tile.uses_tma and not alignment.is_direct and product.added is None:
        _multiply_by_tma(product, alignment, top_k, chip, tile)
        return
    added = product.added
    assert added is None or added.numel() < 2**31, f"additions of {list(added.shape)}"
    weight, activation = product.weight, product.activation
    num_outputs = weight.num_outputs
    grid = (alignment.max_tiles * -(-num_outputs // tile.block_n),)
    grouped_gemm_kernel[grid](
        product.x,
        weight.values,
        weight.scales,
        weight.zeros,
        product.bias,
        product.added,
        product.added_ids,
        product.out,
        alignment.tile_experts,
        alignment.sorted_slots,
        alignment.num_tiles,
        alignment.max_tiles,
        alignment.num_slots,
        weight.num_experts,
        top_k,
        weight.num_inputs,
        num_outputs,
        weight.values.shape[2],
        1 if weight.scales is None else weight.scales.shape[-1],
        FORMAT=weight.weight_format,
        GROUP_C=weight.group,
        IS_GATED=product.is_gated,
        IS_DIRECT=alignment.is_direct,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        UP_OFFSET=activation.up_offset,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_C=tile.block_c,
        GROUP_M=tile.group_m,
        IS_EVEN=weight.num_inputs % tile.block_c == 0,
        HAS_FP8=chip.has_fp8 and weight.weight_format.startswith("fp8"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _multiply_by_tma(
    product: Product,
    alignment: Alignment,
    top_k: int,
    chip: Chip,
    tile: TileConfig,
) -> None:
    weight, activation, x = product.weight, product.activation, product.x
    num_outputs = weight.num_outputs
    num_pieces = alignment.max_tiles * -(-num_outputs // tile.block_n)
    grouped_gemm_tma_kernel[(min(chip.num_processors, num_pieces),)](
        x if product.is_gated else _blocks(x, tile.block_m, tile.block_c),
        _blocks(weight.values.flatten(0, 1), tile.block_n, tile.block_c),
        product.bias,
        product.out,
        alignment.tile_experts,
        alignment.sorted_slots,
        alignment.num_tiles,
        alignment.num_slots,
        top_k,
        weight.num_inputs,
        num_outputs,
        IS_GATED=product.is_gated,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        UP_OFFSET=activation.up_offset,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_C=tile.block_c,
        GROUP_M=tile.group_m,
        IS_EVEN=weight.num_inputs % tile.block_c == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _blocks(rows: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, list(block))


def chip_of(device: torch.device, has_equal_tiles: bool = False) -> Chip:
    """Returns the device's chip with the configurations tuned for it."""
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return Chip(
        capability=known_capability(capability),
        num_processors=properties.multi_processor_count,
        has_equal_tiles=has_equal_tiles,
        has_fp8=capability >= _FIRST_WITH_FP8,
        tuned=load_tuned(properties.name, triton.__version__),
    )


def known_capability(capability: int) -> int:
    """Returns the newest capability that the heuristics know and that is not newer: 89 -> 80."""
    assert capability >= _KNOWN[-1], f"sm_{capability} is older than sm_{_KNOWN[-1]}"
    return next(known for known in _KNOWN if known <= capability)


def has_equal_tiles(experts: GroupedExperts, dtype: torch.dtype, chip: Chip) -> bool:
    """Checks that this chip gives a row the same bits in tiles of all sizes.

    It runs random rows through these experts in every tile size and compares the bits.

    The kernels add in the same order in every size; the instructions a size compiles to might not
    round alike. Waits for the device, and compiles what serving compiles: not while a CUDA graph
    is captured. Experts of the same shapes, format and dtype need one answer.
    """
    device = experts.gate_up.values.device
    generator = torch.Generator(device=device).manual_seed(1)
    x_TD = torch.randn(_ROWS, experts.width, generator=generator, device=device).to(dtype)
    top_k = min(_TOP_K, experts.num_experts)
    # Few experts, so that tiles of all sizes get more rows than one.
    first = torch.arange(_ROWS, device=device) % max(1, min(experts.num_experts, 4) - top_k + 1)
    ids_TK = first[:, None] + torch.arange(top_k, device=device)
    weights_TK = torch.rand(_ROWS, top_k, generator=generator, device=device)
    chip = replace(chip, has_equal_tiles=True)
    results = [
        grouped_experts(x_TD, ids_TK, weights_TK, experts, chip, block_m) for block_m in BLOCK_MS
    ]
    # The direct path: each row alone, where a slot is a tile.
    alone = grouped_experts(
        x_TD[:1], ids_TK[:1].contiguous(), weights_TK[:1], experts, chip, BLOCK_MS[0]
    )
    is_equal = all(torch.equal(result, results[0]) for result in results[1:])
    return is_equal and torch.equal(alone[0], results[0][0])
