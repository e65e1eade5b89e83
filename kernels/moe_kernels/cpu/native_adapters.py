"""Adapters in the native kernels: their matrices, and the rows of a step that have them.

T rows, A adapters, L layers, E experts, D model width, F expert width, R rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.cpu.cpu_library import Int, NativeLibrary, Pointer, address, num_panels
from moe_kernels.cpu.native_changes import (
    HEADS,
    LOW_RANK_PARTS,
    MATRICES,
    NORMS,
    ChangesStruct,
    LayerChangesStruct,
    LayerTuneStruct,
    ModelTuneStruct,
)
from moe_kernels.cpu.native_experts import Addresses, ExpertTable
from moe_kernels.cpu.native_linear import NativeHeadLinear, NativeLinear, NativeRouterLinear
from moe_kernels.cpu.native_rows import NativeStepRows
from moe_kernels.cpu.native_signs import NativeSignedLinear
from moe_kernels.interface.adapters import (
    AdapterParts,
    Addition,
    ExpertAddition,
    LayerTune,
    LowRank,
    ModelTune,
    Rest,
    no_rest,
)
from moe_kernels.interface.routing import RouterShape
from moe_kernels.interface.signed_kernels import SignedBank

_PANEL = 16
RouterOf = Callable[[RouterShape], ctypes.Structure]


class _PartStruct(ctypes.Structure):
    """`LowRankPart` in cpu/source/adapters.h."""

    _fields_ = (("b", Pointer), ("first_rank", Int), ("first_output", Int))


class _LowRankStruct(ctypes.Structure):
    """`LowRank` in cpu/source/adapters.h."""

    _fields_ = (("a", Pointer), ("parts", Pointer), ("num_parts", Int), ("num_outputs", Int))


def _padded(rank: int) -> int:
    return num_panels(rank) * _PANEL


class NativeExpertAdditions:
    """The additions to a layer's experts, packed once."""

    def __init__(
        self,
        native: NativeLibrary,
        additions: Mapping[int, ExpertAddition],
        is_changed_E: Tensor,
        rest: Rest = no_rest,
    ) -> None:
        count = len(is_changed_E)
        self._native, self._is_changed_E = native, is_changed_E.to(torch.uint8).contiguous()
        self._addresses = {name: Addresses(count) for name in LOW_RANK_PARTS}
        self._packed: dict[tuple[object, ...], tuple[object, Tensor]] = {}
        self.num_bytes = 0
        ranks = {
            part: max((1, *(_rank(getattr(each, part)) for each in additions.values())))
            for part in ("gate", "up", "down")
        }
        is_shared = all(_is_shared(each) for each in additions.values())
        up_first = 0 if is_shared else _padded(ranks["gate"])
        up_width = up_first + _padded(ranks["up"])
        for expert, each in additions.items():
            self._put_up(expert, each, ranks, up_first, up_width)
            self._put_down(expert, each.down, ranks["down"])
            rest()
        self.struct = ChangesStruct(
            self._is_changed_E.data_ptr(), None,
            *(ctypes.addressof(self._addresses[name].array) for name in LOW_RANK_PARTS),
            up_width, up_first, ranks["gate"], ranks["up"], _padded(ranks["down"]), ranks["down"],
        )  # fmt: skip
        self._packed.clear()  # the tables keep the memory
        self.pointer = ctypes.addressof(self.struct)
        self._alone = LayerChangesStruct(experts=self.pointer)
        self.layer_pointer = ctypes.addressof(self._alone)

    def _put_up(
        self,
        expert: int,
        each: ExpertAddition,
        ranks: Mapping[str, int],
        up_first: int,
        up_width: int,
    ) -> None:
        known = each.gate or each.up
        if known is None:
            return
        gate, up = each.gate, each.up
        matrices = [(gate, 0)] if up_first == 0 else [(gate, 0), (up, up_first)]
        self._put("up_a", expert, [(m.a_RK, first) for m, first in matrices if m], up_width)
        num_outputs = len(known.b_NR)
        for name, part in (("gate", gate), ("up", up)):
            b_NR = known.b_NR.new_zeros(num_outputs, ranks[name]) if part is None else part.b_NR
            self._put(f"{name}_b", expert, [(b_NR, 0)], num_outputs, ranks[name])

    def _put_down(self, expert: int, down: Addition | None, rank: int) -> None:
        if down is not None:
            self._put("down_a", expert, [(down.a_RK, 0)], _padded(rank))
            self._put("down_b", expert, [(down.b_NR, 0)], len(down.b_NR), rank)

    def _put(
        self,
        name: str,
        expert: int,
        matrices: Sequence[tuple[Tensor, int]],
        num_rows: int,
        width: int | None = None,
    ) -> None:
        """Packs matrices below each other, filled up with zeros. Equal ones of several experts are
        packed once."""
        key = (name, *((m.data_ptr(), m.shape, m.stride(), first) for m, first in matrices))
        found = self._packed.get(key)
        if found is None:
            width = matrices[0][0].shape[1] if width is None else width
            whole = torch.zeros(num_rows, width, dtype=self._native.dtype)
            for matrix, first in matrices:
                whole[first : first + len(matrix), : matrix.shape[1]] = matrix
            panels = num_panels(num_rows)
            memory = torch.empty(self._native.packed_size(panels, width), dtype=torch.int32)
            self._native.pack(whole, memory, panels)
            self.num_bytes += memory.nbytes
            found = self._packed[key] = (matrices, memory)  # keeps the tensors' addresses in use
        self._addresses[name].put(expert, found[1])


def _rank(addition: Addition | None) -> int:
    return 0 if addition is None else len(addition.a_RK)


def _is_shared(each: ExpertAddition) -> bool:
    """Returns whether gate and up have the same A, or neither is changed."""
    if each.gate is None or each.up is None:
        return each.gate is each.up
    return each.gate.a_RK is each.up.a_RK


class NativeAdapter:
    """An adapter's changes by layer. It keeps what they point to."""

    def __init__(self, layers: Sequence[AdapterParts], model: ModelTune | None = None) -> None:
        self._kept: list[Any] = [layers, model]
        self._array = (LayerChangesStruct * len(layers))()
        for struct, parts in zip(self._array, layers, strict=True):
            for key, added in parts.linears.items():
                struct.linears[MATRICES[key]] = self._low_rank(added)
            assert parts.own is None or parts.additions is None, "an expert is replaced or changed"
            struct.experts = self._own(parts.own)
            if parts.additions is not None:
                struct.experts = parts.additions.pointer
            assert parts.mlp is None or parts.mlp_additions is None, "replaced, or changed"
            struct.mlp = self._own(parts.mlp)
            if parts.mlp_additions is not None:
                struct.mlp = parts.mlp_additions.pointer
            struct.tune = None if parts.tune is None else self._tune(parts.tune)
        self.pointer = ctypes.addressof(self._array)
        self.model_pointer = None if model is None else self._model(model)

    def _tune(self, tune: LayerTune) -> int:
        assert tune.router is None or isinstance(tune.router, NativeRouterLinear), "a native router"
        struct = LayerTuneStruct(
            attended=tuple(address(each) for each in (tune.q_norm, tune.k_norm, tune.sinks_H)),
            router=None if tune.router is None else tune.router.pointer,
            selection_bias=address(tune.selection_bias_E),
        )
        for key, layer in tune.signs.items():
            assert isinstance(layer, NativeSignedLinear), "a native layer with signs"
            struct.signs[MATRICES[key]] = layer.signs.pointer
        for key, norm_D in tune.norms.items():
            struct.norms[NORMS[key]] = norm_D.data_ptr()
        for key, head in tune.heads.items():
            assert isinstance(head, NativeHeadLinear), "native layers"
            struct.heads[HEADS[key]] = head.pointer
        self._kept.append(struct)
        return ctypes.addressof(struct)

    def _model(self, model: ModelTune) -> int:
        assert model.head is None or isinstance(model.head, NativeLinear), "a native head"
        head = None if model.head is None else model.head.pointer
        struct = ModelTuneStruct(address(model.embedding_VD), address(model.final_norm_D), head)
        self._kept.append(struct)
        return ctypes.addressof(struct)

    def _low_rank(self, added: LowRank) -> int:
        assert isinstance(added.a, NativeLinear), "native layers"
        parts = (_PartStruct * len(added.parts))()
        for struct, part in zip(parts, added.parts, strict=True):
            assert isinstance(part.b, NativeLinear), "native layers"
            struct.b, struct.first_rank = part.b.pointer, part.ranks.start
            struct.first_output = part.outputs.start
        whole = _LowRankStruct(
            added.a.pointer, ctypes.addressof(parts), len(parts), added.num_outputs
        )
        self._kept += [parts, whole]
        return ctypes.addressof(whole)

    def _own(self, bank: object) -> int | None:
        """Returns the changes that consist of a bank's experts, or of its signs."""
        if bank is None:
            return None
        if isinstance(bank, SignedBank):
            pointer: int = bank.signs.pointer
            return pointer
        assert isinstance(bank, ExpertTable), f"native experts, not {type(bank).__name__}"
        unchanged_E = torch.zeros(bank.num_experts, dtype=torch.uint8)
        struct = ChangesStruct(is_changed=unchanged_E.data_ptr(), own=bank.pointer)
        self._kept += [unchanged_E, struct]
        return ctypes.addressof(struct)


class NativeAdapterKernels:
    """Implements AdapterKernels."""

    adds_to_experts = True

    def __init__(self, native: NativeLibrary, router: RouterOf) -> None:
        self._native, self._router = native, router

    def expert_additions(
        self,
        additions: Mapping[int, ExpertAddition],
        is_changed_E: Tensor,
        rest: Rest = no_rest,
    ) -> NativeExpertAdditions:
        return NativeExpertAdditions(self._native, additions, is_changed_E, rest)

    def adapter(
        self, layers: Sequence[AdapterParts], model: ModelTune | None = None
    ) -> NativeAdapter:
        return NativeAdapter(layers, model)

    def rows(self, index_T: NDArray[np.int64], adapters: Sequence[NativeAdapter]) -> NativeStepRows:
        models = [each.model_pointer for each in adapters]
        layers = [each.pointer for each in adapters]
        return NativeStepRows(self._native, self._router, index_T, layers, adapters, models)
