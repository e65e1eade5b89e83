"""Adapters inside the kernels: what a fine-tune adds to the layers of a base model, for its rows.

T rows, A adapters of a step, L layers, E experts, N outputs, K inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.interface.routing import RouterShape

Rest = Callable[[], None]  # called after each expert: a load beside steps may pause there


def no_rest() -> None:
    """Continues without a pause."""


@dataclass(frozen=True, slots=True)
class Addition:
    """The addition (x A^T) B^T to a matrix [N, K], in the model's dtype; B contains the scale.

    Sums are in fp32. x A^T is rounded to the model's dtype."""

    a_RK: Tensor
    b_NR: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAddition:
    """The additions to one expert. Gate and up may share the tensor A."""

    gate: Addition | None = None
    up: Addition | None = None
    down: Addition | None = None


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """B of some neighbouring outputs [N, R], from some neighbouring ranks."""

    b: Any  # a Linear of the same kernels; it contains the scale
    ranks: slice
    outputs: slice


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a linear layer: (x A^T) B^T, whose B is cut into parts. Sums are in fp32;
    x A^T is rounded to the model's dtype, as in PEFT."""

    a: Any  # a Linear of the same kernels
    parts: tuple[LowRankPart, ...]
    num_outputs: int  # of the layer; those in no part keep their values

    def added(self, x_RK: Tensor, y_RN: Tensor) -> Tensor:
        """Returns y and the addition, rounded to y's dtype. May write to y."""
        low_RR = self.a(x_RK)
        for part in self.parts:
            own = part.b(low_RR[:, part.ranks].contiguous(), y_RN[:, part.outputs].contiguous())
            y_RN[:, part.outputs] = own
        return y_RN


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTune:
    """The parts of a layer that a whole fine-tune replaces. None, or a key that is absent: the base
    model's part is used."""

    # The base model's linear layers with signs (`SignedKernels.signed_linear`), keyed as
    # `AdapterParts.linears`.
    signs: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, Tensor] = field(default_factory=dict)  # attention, moe, query (of latents)
    q_norm: Tensor | None = None  # of latent attention: the norm of the latents
    k_norm: Tensor | None = None
    sinks_H: Tensor | None = None
    heads: Mapping[str, Any] = field(default_factory=dict)  # HeadLinears: key_up and value_up
    router: Any | None = None  # a RouterLinear of the same kernels
    selection_bias_E: Tensor | None = None  # of its own router


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTune:
    """The replaced parts outside of the layers."""

    embedding_VD: Tensor | None = None
    final_norm_D: Tensor | None = None
    head: Any | None = None  # a Linear of the same kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterParts:
    """The changes of an adapter to one layer: linear layers, experts and an MLP in place of the
    base model's (ESFT), and additions to either, which `expert_additions` has made.

    `linears`: by part of attention: qkv and output; of latent attention query_down, query, latent
    and output."""

    linears: Mapping[str, LowRank] = field(default_factory=dict)
    own: Any | None = None  # an ExpertBank of the same kernels
    additions: Any | None = None
    mlp: Any | None = None  # a bank of one expert
    mlp_additions: Any | None = None  # to the base model's MLP, as expert 0
    tune: LayerTune | None = None


@dataclass(frozen=True, slots=True)
class RowAdditions:
    """The additions to the experts of a layer, for some rows."""

    index_T: NDArray[np.int64]  # of each row's additions; -1: it has none
    additions: Sequence[Any]  # made by `expert_additions`

    @classmethod
    def of(cls, index_T: NDArray[np.int64], additions: Sequence[Any | None]) -> RowAdditions | None:
        """Returns them without the adapters that have none (None); None if no adapter has any.

        Worked example: index [0, -1, 1, 2] and additions [None, a, b] -> [-1, -1, 0, 1], [a, b].
        """
        kept = [each for each in additions if each is not None]
        if not kept:
            return None
        if len(kept) == len(additions):
            return cls(index_T, kept)
        is_kept = np.array([each is not None for each in additions] + [False])  # of -1: the last
        places = np.where(is_kept, np.cumsum(is_kept) - 1, -1)
        return cls(places[index_T], kept)


@runtime_checkable
class AddingBank(Protocol):
    """An ExpertBank that adds what adapters add to its experts."""

    def added_partial(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, added: RowAdditions
    ) -> Tensor:
        """Returns the sum [T, D] in fp64, as `ExpertBank.partial` does."""
        ...


class AdaptedRows(Protocol):
    """The adapters of a step's rows, for layer_front and layer_stack, and for layers that run part
    by part. Each method applies what all adapters have in a layer, and leaves other rows as they
    are. It may write to the result that it is given."""

    def add(self, layer: int, linear: str, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """Returns a linear layer's result with the additions to it. `linear`: a key of
        `AdapterParts.linears`."""
        ...

    def normed(self, layer: int, norm: str, x_TD: Tensor, y_TD: Tensor, eps: float) -> Tensor:
        """Returns normed rows `y_TD`. A fine-tune's own norm replaces the base model's."""
        ...

    def lifted(self, layer: int, up: str, x_THK: Tensor, y_THN: Tensor) -> Tensor:
        """Returns the result of a HeadLinear. A fine-tune's own layer replaces the base's."""
        ...

    def planned(
        self, layer: int, plan: Any, norms: tuple[Tensor | None, Tensor | None], sinks_H: Any
    ) -> Any:
        """Returns a plan of attention in which rows of fine-tunes have their own norms and sinks.
        `norms`: the base model's, of queries and keys."""
        ...

    def routed(
        self, layer: int, shape: RouterShape, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> None:
        """Replaces the choices of rows whose fine-tune has its own router."""
        ...


class AdapterKernels(Protocol):
    """Makes what the kernels of a set need to serve adapters. `adds_to_experts`: it has
    `expert_additions`; otherwise a LoRA of experts is merged into copies of these."""

    adds_to_experts: bool

    def expert_additions(
        self,
        additions: Mapping[int, ExpertAddition],
        is_changed_E: Tensor,
        rest: Rest = no_rest,
    ) -> Any:
        """Prepares the additions to a layer's experts, those of them that are here.

        `is_changed_E` [E] bool: the experts that the adapter changes, here or elsewhere. Has
        `num_bytes`."""
        ...

    def adapter(self, layers: Sequence[AdapterParts], model: ModelTune | None = None) -> Any | None:
        """Prepares an adapter for `rows`; None: this set has no such rows."""
        ...

    def rows(self, index_T: NDArray[np.int64], adapters: Sequence[Any]) -> AdaptedRows:
        """Prepares the adapters of a step's rows. `index_T`: the number of each row's adapter among
        `adapters`, or -1."""
        ...
