"""Builds the weights of experts, in floats or packed, from a checkpoint's tensors.

D model width, F expert width, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar, overload

from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights
from moe_kernels.interface.quantised_matrix import MatrixForm, Weight
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import Stored, Table, expert_table
from moe_serve.model.checkpoint.tensor_names import ExpertNames, TensorNames
from moe_serve.model.load.expert_packing import BankForms, ExpertPacking, StoredProduct
from moe_serve.model.load.weight_reader import ModelTensors, WeightSource
from moe_serve.model.spec import ModelSpec


class ExpertLoader:
    """Reads experts, shared experts and dense MLPs. The constructor decides which stay packed."""

    def __init__(
        self,
        spec: ModelSpec,
        names: ExpertNames,
        tensors: ModelTensors,
        packing: ExpertPacking,
    ) -> None:
        self._spec, self._names, self._tensors, self._packing = spec, names, tensors, packing
        self._forms = [self._routed_forms(layer) for layer in range(spec.num_layers)]

    def forms_of(self, layers: Collection[int]) -> set[BankForms]:
        """Returns the forms of the routed experts of these layers; a single one if all are
        alike."""
        return {self._forms[layer] for layer in layers}

    def with_tensors(self, tensors: ModelTensors) -> ExpertLoader:
        """Returns a loader of the same experts that reads from other tensors."""
        other = copy.copy(self)
        other._tensors = tensors
        return other

    def layer(self, layer: int, held: Collection[int]) -> LayerExperts:
        """Returns routed experts, to be read once and in order;
        copy each before reading the next.
        """
        return LayerExperts(self, layer, self._spec.router.num_experts, frozenset(held))

    def read(self, layer: int, expert: int) -> ExpertWeights:
        """Reads one routed expert. Its weights may be views of the file."""
        names, forms = self._names, self._forms[layer]
        table = expert_table(names, self._spec, layer, expert)
        if names.gate:
            gate, up = (self._matrix(table[key], forms.gate_up) for key in ("gate", "up"))
            return ExpertWeights(gate, up, self._matrix(table["down"], forms.down))
        fused, down = (
            self._matrix(table[key], form, expert, is_transposed=names.is_transposed)
            for key, form in (("gate_up", forms.gate_up), ("down", forms.down))
        )
        gate, up = _gate_and_up(fused, is_interleaved=names.is_interleaved)
        if not self._spec.has_expert_bias:
            return ExpertWeights(gate, up, down)
        fused_bias, down_bias = (
            self._tensors.read(table[key], expert=expert) for key in ("gate_up_bias", "down_bias")
        )
        biases = _gate_and_up(fused_bias, is_interleaved=names.is_interleaved)
        return ExpertWeights(gate, up, down, *biases, down_bias)

    def drop(self, layer: int, expert: int) -> None:
        """Releases an expert's pages; the caller has copied it."""
        for item in expert_table(self._names, self._spec, layer, expert).values():
            self._tensors.done(item, None if self._names.gate else expert)

    def dense(self, parts: Table) -> ExpertWeights:
        """Reads a shared expert or a dense MLP: gate, up and down, or gate_up and down."""
        forms = self._packing.forms(*_dense_products(parts), is_routed=False)
        if "gate_up" in parts:
            gate, up = _gate_and_up(self._matrix(parts["gate_up"], forms.gate_up))
        else:
            gate, up = (self._matrix(parts[key], forms.gate_up) for key in ("gate", "up"))
        biases = {k: self._tensors.read(item) for k, item in parts.items() if k.endswith("bias")}
        if "gate_up_bias" in biases:
            biases["gate_bias"], biases["up_bias"] = _gate_and_up(biases["gate_up_bias"])
        return ExpertWeights(
            gate,
            up,
            self._matrix(parts["down"], forms.down),
            *(biases.get(key) for key in ("gate_bias", "up_bias", "down_bias")),
        )

    def _routed_forms(self, layer: int) -> BankForms:
        """Decides the forms of a layer's routed experts, over all separate experts; fused ones are
        alike.
        """
        names = self._names
        if not self._spec.layers[layer].is_sparse:
            return BankForms()
        if not names.gate:
            return self._packing.forms(*_fused_products(names, self._spec, layer))
        tables = [
            expert_table(names, self._spec, layer, expert)
            for expert in range(self._spec.router.num_experts)
        ]
        return self._packing.forms(
            StoredProduct(tensors=[table[key] for table in tables for key in ("gate", "up")]),
            StoredProduct(tensors=[table["down"] for table in tables]),
        )

    def _matrix(
        self,
        stored: Stored,
        form: MatrixForm | None,
        expert: int | None = None,
        *,
        is_transposed: bool = False,
    ) -> Weight:
        """Returns [outputs, inputs], packed if it has a form. May be a view of the file."""
        if form is None:
            weight = self._tensors.read(stored, expert=expert)
            return weight.t() if is_transposed else weight
        matrix = self._tensors.read_packed(stored, expert)
        if matrix.form.is_transposed != is_transposed:
            matrix = matrix.transposed()
        assert matrix.form == form, f"{stored.name} is {matrix.form}, not {form}"
        return matrix


class LayerExperts(Sequence[ExpertWeights | None]):
    """The experts of a layer. Each is read on access, which releases the previous one.

    So at most one expert is in memory twice: as stored and as held. None means that an expert is
    not held here.
    """

    def __init__(
        self, loader: ExpertLoader, layer: int, num_experts: int, held: frozenset[int]
    ) -> None:
        is_some = held and 0 <= min(held) <= max(held) < num_experts
        assert is_some, f"experts {sorted(held)} of {num_experts}"
        self._loader, self._layer, self._num_experts = loader, layer, num_experts
        self._held, self._read = held, -1

    @property
    def num_held(self) -> int:
        """See moe_kernels.cpu.native_experts.LazyExperts."""
        return len(self._held)

    def __len__(self) -> int:
        return self._num_experts

    @overload
    def __getitem__(self, index: int) -> ExpertWeights | None: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ExpertWeights | None]: ...
    def __getitem__(
        self, index: int | slice
    ) -> ExpertWeights | None | Sequence[ExpertWeights | None]:
        assert isinstance(index, int), "experts are read one by one"
        if not 0 <= index < len(self):
            raise IndexError(index)
        if index not in self._held:
            return None
        self.done()
        self._read = index
        return self._loader.read(self._layer, index)

    def done(self) -> None:
        """Releases the expert that was read last."""
        if self._read >= 0:
            self._loader.drop(self._layer, self._read)
            self._read = -1


def _fused_products(
    names: ExpertNames, spec: ModelSpec, layer: int
) -> tuple[StoredProduct, StoredProduct]:
    table = expert_table(names, spec, layer, 0)
    gate_up = StoredProduct(
        tensors=[table["gate_up"]],
        expert=0,
        half=spec.expert_width,
        is_interleaved=names.is_interleaved,
        is_transposed=names.is_transposed,
    )
    down = StoredProduct(tensors=[table["down"]], expert=0, is_transposed=names.is_transposed)
    return gate_up, down


def _dense_products(parts: Table) -> tuple[StoredProduct, StoredProduct]:
    down = StoredProduct(tensors=[parts["down"]])
    fused = parts.get("gate_up")
    if fused is None:
        return StoredProduct(tensors=[parts["gate"], parts["up"]]), down
    return StoredProduct(tensors=[fused], half=fused.shape[0] // 2), down


_Rows = TypeVar("_Rows", Tensor, Weight)


def _gate_and_up(fused: _Rows, *, is_interleaved: bool = False) -> tuple[_Rows, _Rows]:
    """Returns the rows of the gate and of the up projection, from [2 F, ...]."""
    half = fused.shape[0] // 2
    gate, up = slice(None, half), slice(half, None)
    if is_interleaved:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    if isinstance(fused, Tensor):
        return fused[gate], fused[up]
    return fused.rows(gate), fused.rows(up)


def expert_names(names: TensorNames, spec: ModelSpec, reader: WeightSource) -> ExpertNames:
    """Returns the layout that this checkpoint has; if none, the first, for the error message.

    Two layouts may differ in their shapes only.
    """
    layers = [layer for layer in range(spec.num_layers) if spec.layers[layer].is_sparse][:1]
    tables = [
        (layout, [s for layer in layers for s in expert_table(layout, spec, layer, 0).values()])
        for layout in names.experts
    ]
    there = [(layout, table) for layout, table in tables if all(reader.has(s.name) for s in table)]
    for layout, table in there:
        if all(_is_as_expected(stored, reader) for stored in table):
            return layout
    return (there or tables)[0][0]


def _is_as_expected(stored: Stored, reader: WeightSource) -> bool:
    try:
        reader.expect(stored.name, stored.shape)
    except CheckpointError:
        return False
    return True
