"""Additions of BitDelta adapters on a GPU: to linear layers, and to the experts of a layer.

    T rows, K choices, S = T * K slots, A adapters of a step, E experts, N outputs, C inputs

Nothing waits for the device, but the adapters of rows come from the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_kernels.gpu.align.api import Alignment, align
from moe_kernels.gpu.grouped_gemm.grouped_linear import RowTiles
from moe_kernels.gpu.signs.heuristics import BLOCK_M, sign_tile
from moe_kernels.gpu.signs.kernel import signed_product_kernel
from moe_kernels.interface.adapters import RowAdditions
from moe_kernels.interface.kernels import Linear
from moe_kernels.interface.sign_matrix import SignedExpert, SignMatrix

_NONE = (0, 0, 0, 0)  # addresses of a matrix that there is not


@dataclass(frozen=True, slots=True, kw_only=True)
class SignTable:
    """The addresses of matrices [X, P, 4], which all have the same shape."""

    entries: Tensor
    num_outputs: int
    num_inputs: int

    @property
    def num_parts(self) -> int:
        return self.entries.shape[1]


class GpuSignedLinear:
    """Implements Linear: the result of another layer, and the addition, which is in `table`."""

    def __init__(self, base: Linear, added: SignMatrix, tiles: RowTiles) -> None:
        self._base, self._tiles = base, tiles
        self._added = added = _contiguous(added)
        entries = torch.tensor([[_entry(added)]], device=added.bits_NB.device)
        self.table = SignTable(
            entries=entries, num_outputs=added.num_rows, num_inputs=added.num_columns
        )

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        y_TN = self._base(x_TK) if residual_TN is None else self._base(x_TK, residual_TN)
        num_rows, y_TN = len(x_TK), y_TN.contiguous()
        if num_rows == 0:
            return y_TN
        alignment = self._tiles.of_rows(num_rows, BLOCK_M)
        rows_T = torch.arange(num_rows, device=x_TK.device)
        out_TN = torch.empty_like(y_TN)
        _multiply(self.table, x_TK, rows_T, alignment, out_TN, y_TN)
        return out_TN


def add_signs(
    layers: Sequence[GpuSignedLinear | None], x_TK: Tensor, y_TN: Tensor, alignment: Alignment
) -> None:
    """Adds the signs of several adapters to the result of the base model's layer, in place.

    `alignment`: of the rows by adapter, from `align_tiles`; it has no row of an adapter without
    signs."""
    known = next(each.table for each in layers if each is not None)
    absent = torch.zeros_like(known.entries)
    entries = [absent if each is None else each.table.entries for each in layers]
    table = replace(known, entries=torch.cat(entries))
    rows_T = torch.arange(len(x_TK), device=x_TK.device)
    _multiply(table, x_TK, rows_T, alignment, y_TN, y_TN)


class GpuExpertSigns:
    """The additions to a layer's experts. Their matrices stay where they are."""

    def __init__(self, added: Mapping[int, SignedExpert], is_changed_E: Tensor) -> None:
        self.num_bytes = sum(each.nbytes for each in added.values())
        self._added = {
            expert: tuple(
                None if part is None else _contiguous(part)
                for part in (each.gate, each.up, each.down)
            )
            for expert, each in added.items()
        }
        parts = [p for each in self._added.values() for p in each if p is not None]
        device = parts[0].bits_NB.device if parts else is_changed_E.device
        num_experts = len(is_changed_E)
        absent = (None, None, None)
        rows = [self._added.get(expert, absent) for expert in range(num_experts)]
        entries = torch.tensor([[_entry(part) for part in row] for row in rows], device=device)
        self.up_entries, self.down_entries = entries[:, :2], entries[:, 2:]
        # [E + 1]; the last entry is for id -1, which indexes it.
        is_here = [expert in self._added for expert in range(num_experts)] + [False]
        self.is_here_E = torch.tensor(is_here, device=device)
        self.is_changed_E = torch.nn.functional.pad(is_changed_E.to(device), (0, 1))


class SlotSigns:
    """Implements SlotAdditions: the additions to the choices of some rows' experts."""

    def __init__(
        self, expert_ids_TK: Tensor, additions: RowAdditions, widths: tuple[int, int]
    ) -> None:
        """`widths`: of the model and of an expert."""
        signs: Sequence[GpuExpertSigns] = additions.additions
        self._width, self._expert_width = widths
        self._num_choices = expert_ids_TK.shape[1]
        num_experts = len(signs[0].is_here_E) - 1
        index_T1 = torch.from_numpy(additions.index_T).to(expert_ids_TK.device)[:, None]
        owner_T1 = index_T1.clamp(min=0)
        is_known_TK = (expert_ids_TK >= 0) & (expert_ids_TK < num_experts)
        inner_TK = torch.where(is_known_TK, expert_ids_TK, num_experts)
        changed_AE = torch.stack([each.is_changed_E for each in signs])
        here_AE = torch.stack([each.is_here_E for each in signs])
        is_changed_TK = changed_AE[owner_T1, inner_TK] & (index_T1 >= 0)
        is_here_TK = here_AE[owner_T1, inner_TK]
        virtual_TK = owner_T1 * num_experts + expert_ids_TK
        self.ids_TK = torch.where(is_changed_TK & is_here_TK, virtual_TK, -1).contiguous()
        # An addition that is elsewhere: that process computes the choice.
        self.kept_ids_TK = torch.where(is_changed_TK & ~is_here_TK, -1, expert_ids_TK)
        self._alignment = align_tiles(self.ids_TK, num_experts * len(signs))
        self._up_entries = torch.cat([each.up_entries for each in signs])
        self._down_entries = torch.cat([each.down_entries for each in signs])

    def gate_up(self, x_TD: Tensor) -> Tensor:
        """See SlotAdditions."""
        table = SignTable(
            entries=self._up_entries, num_outputs=self._expert_width, num_inputs=self._width
        )
        slots_S = torch.arange(self.ids_TK.numel(), device=x_TD.device)
        return self._product(table, x_TD, slots_S // self._num_choices)

    def down(self, hidden_PF: Tensor, places_S: Tensor) -> Tensor:
        """See SlotAdditions."""
        table = SignTable(
            entries=self._down_entries, num_outputs=self._width, num_inputs=self._expert_width
        )
        return self._product(table, hidden_PF, places_S)

    def _product(self, table: SignTable, x: Tensor, rows_S: Tensor) -> Tensor:
        num_columns = table.num_parts * table.num_outputs
        out = torch.empty(len(rows_S), num_columns, dtype=torch.float32, device=x.device)
        _multiply(table, x, rows_S, self._alignment, out, None)
        return out


def align_tiles(ids_TK: Tensor, num_matrices: int) -> Alignment:
    """Groups slots by matrix. A tile of a single slot is one of `BLOCK_M`, as all others."""
    alignment = align(ids_TK, num_matrices, BLOCK_M)
    if not alignment.is_direct:
        return alignment
    ids_S = ids_TK.view(-1)
    num_slots, device = len(ids_S), ids_S.device
    slots_SM = torch.full((num_slots, BLOCK_M), num_slots, dtype=torch.int32, device=device)
    slots_SM[:, 0] = torch.arange(num_slots, dtype=torch.int32, device=device)
    return Alignment(
        block_rows=BLOCK_M,
        max_tiles=num_slots,
        num_slots=num_slots,
        tile_experts=ids_S.int(),
        sorted_slots=slots_SM.view(-1),
        num_tiles=torch.full((1,), num_slots, dtype=torch.int32, device=device),
        counts_E=None,
        tile_starts_E=None,
    )


def _contiguous(matrix: SignMatrix) -> SignMatrix:
    """Returns a matrix whose tensors have no gaps; those that have none already are shared."""
    bias_N = None if matrix.bias_N is None else matrix.bias_N.float().contiguous()
    return SignMatrix(
        bits_NB=matrix.bits_NB.contiguous(),
        num_columns=matrix.num_columns,
        scales_N=matrix.scales_N.float().contiguous(),
        bias_N=bias_N,
    )


def _entry(matrix: SignMatrix | None) -> tuple[int, int, int, int]:
    """Returns the addresses of a matrix for the kernel."""
    if matrix is None:
        return _NONE
    bias_at = 0 if matrix.bias_N is None else matrix.bias_N.data_ptr()
    step = 0 if len(matrix.scales_N) == 1 else 1
    return matrix.bits_NB.data_ptr(), matrix.scales_N.data_ptr(), bias_at, step


def _multiply(
    table: SignTable,
    x: Tensor,
    rows_S: Tensor,
    alignment: Alignment,
    out: Tensor,
    base: Tensor | None,
) -> None:
    tile, x = sign_tile(x.element_size()), x.contiguous()
    assert x.shape[1] == table.num_inputs, f"x is {list(x.shape)}, not [.., {table.num_inputs}]"
    num_blocks = -(-table.num_outputs // tile.block_n)
    signed_product_kernel[(alignment.max_tiles * num_blocks, table.num_parts)](
        x,
        rows_S,
        table.entries.contiguous(),
        base,
        out,
        alignment.tile_experts,
        alignment.sorted_slots,
        alignment.num_tiles,
        alignment.num_slots,
        len(table.entries),
        table.num_inputs,
        table.num_outputs,
        -(-table.num_inputs // 8),
        PARTS=table.num_parts,
        BLOCK_M=BLOCK_M,
        BLOCK_N=tile.block_n,
        BLOCK_C=tile.block_c,
        GROUP_M=tile.group_m,
        IS_EVEN=table.num_inputs % tile.block_c == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
