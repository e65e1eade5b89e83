"""A checkpoint in which some weights are replaced by their rounded versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from moe_kernels.interface.kernels import ExpertWeights
from moe_kernels.interface.quantised_matrix import MatrixForm, QuantisedMatrix
from moe_serve.model.checkpoint.checkpoint import Shape
from moe_serve.model.load.load_experts import ExpertLoader
from moe_serve.model.load.weight_reader import WeightSource
from moe_serve.quantize.quantise_plan import PlannedExpert
from moe_serve.quantize.rounded_matrix import RoundedMatrix


class SubstitutedWeights:
    """Implements WeightSource: a weight in `rounded` is read from there, every other one from the
    checkpoint, which is not quantised.
    """

    def __init__(self, source: WeightSource, rounded: dict[str, RoundedMatrix]) -> None:
        self._source, self.rounded = source, rounded

    @property
    def format_name(self) -> str:
        return self._source.format_name

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._source.stored_dtype(name)

    def expect(self, name: str, shape: Shape) -> None:
        self._source.expect(name, shape)

    def read(
        self, name: str, shape: Shape, dtype: torch.dtype, expert: int | None = None
    ) -> Tensor:
        """See WeightSource."""
        if name in self.rounded:
            return self.rounded[name].floats(dtype)
        return self._source.read(name, shape, dtype, expert)

    def form(self, name: str, shape: Shape, expert: int | None = None) -> MatrixForm | None:
        return self._source.form(name, shape, expert)

    def read_packed(self, name: str, shape: Shape, expert: int | None = None) -> QuantisedMatrix:
        return self._source.read_packed(name, shape, expert)

    def done(self, name: str, expert: int | None = None) -> None:
        self._source.done(name, expert)

    def copying(self) -> WeightSource:
        return SubstitutedWeights(self._source.copying(), self.rounded)


class RoundedExperts(Sequence[ExpertWeights]):
    """The routed experts of a layer in floats, each made on access from its rounded matrices."""

    def __init__(
        self,
        loader: ExpertLoader,
        layer: int,
        planned: Sequence[PlannedExpert],
        rounded: dict[str, RoundedMatrix],
        dtype: torch.dtype,
    ) -> None:
        self._loader, self._layer, self._planned = loader, layer, planned
        self._rounded, self._dtype = rounded, dtype

    @property
    def num_held(self) -> int:
        """See moe_kernels.interface.kernels.LazyExperts."""
        return len(self)

    def __len__(self) -> int:
        return len(self._planned)

    @overload
    def __getitem__(self, index: int) -> ExpertWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ExpertWeights]: ...
    def __getitem__(self, index: int | slice) -> ExpertWeights | Sequence[ExpertWeights]:
        assert isinstance(index, int), "experts are made one by one"
        if not 0 <= index < len(self):
            raise IndexError(index)
        gate, up, down = (
            self._rounded[matrix.name].floats(self._dtype)
            for matrix in self._planned[index].matrices
        )
        stored = self._loader.read(self._layer, index)  # for its biases
        return replace(stored, gate=gate, up=up, down=down)
