"""Names the modules of the base model that an adapter may change, by the names of its checkpoint.

D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.manifest import (
    Stored,
    attention_table,
    expert_table,
    feed_forward_table,
)
from moe_serve.model.checkpoint.tensor_names import ExpertNames
from moe_serve.model.load.loader import ModelLoader

_MATRICES = ("q", "k", "v", "o", "q_a", "q_b", "kv_a")  # of attention_table
_MLP_PARTS = ("gate", "up", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMatrix:
    """A matrix [N, K] of the base model: of its attention, of an MLP that all rows pass, or of a
    routed expert."""

    layer: int
    kind: Literal["attention", "mlp", "expert"]
    part: str  # the key of attention_table, or gate, up, gate_up, down
    shape: tuple[int, ...]
    expert: int = -1  # of the routed ones


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The module with all routed experts of a layer as two tensors: gate_up and down."""

    layer: int
    is_interleaved: bool


class AdapterTargets:
    """Finds the target of a module's name."""

    def __init__(self, loader: ModelLoader) -> None:
        self.spec = loader.spec
        self._refused: dict[str, str] = {}
        self._fused: dict[str, FusedExperts] = {}
        self._known = dict(self._all(loader))

    def target(self, module: str, where: str) -> AdaptedMatrix:
        """Returns the target of a module. Raises CheckpointError for another module; `where` names
        the file and the tensor."""
        known = self._known.get(module)
        if known is not None:
            return known
        why = self._refused.get(module)
        if why is not None:
            raise CheckpointError(f"{where} changes {why}, which adapters cannot change here.")
        raise CheckpointError(
            f"{where} belongs to no matrix that an adapter of this model may change: allowed are "
            "the projections of attention, of shared and routed experts, and of dense layers."
        )

    @property
    def modules(self) -> Mapping[str, AdaptedMatrix]:
        """All matrices that have a module of their own in some checkpoint."""
        return self._known

    @property
    def fused_modules(self) -> Mapping[str, FusedExperts]:
        """All modules that have the routed experts of a layer as two tensors."""
        return self._fused

    def fused(self, module: str) -> FusedExperts | None:
        """Returns the experts that a module has as two tensors; None: it has none."""
        return self._fused.get(module)

    def _all(self, loader: ModelLoader) -> Iterator[tuple[str, AdaptedMatrix]]:
        names, spec = loader.names, loader.spec
        self._refuse(names.embedding, "the token embeddings")
        self._refuse(names.head, "the output head")
        for layer in range(spec.num_layers):
            table = attention_table(names, spec, layer)
            for part in _MATRICES:
                if part in table:
                    yield _entry(table[part], layer, "attention", part)
            if "kv_b" in table:
                self._refuse(table["kv_b"].name, "kv_b_proj, which is absorbed by latent attention")
            table = feed_forward_table(names, spec, layer)
            yield from _mlp(table, layer)
            for key in ("router", "shared_gate"):
                if key in table:
                    self._refuse(table[key].name, "a router, or the gate of a shared expert")
            if spec.layers[layer].is_sparse:
                for layout in names.experts:
                    yield from self._experts(layout, layer)

    def _experts(self, layout: ExpertNames, layer: int) -> Iterator[tuple[str, AdaptedMatrix]]:
        if not layout.gate:
            module = layout.down.format(layer=layer).rpartition(".")[0]
            self._fused[module] = FusedExperts(layer, layout.is_interleaved)
            return
        for expert in range(self.spec.router.num_experts):
            table = expert_table(layout, self.spec, layer, expert)
            for part, stored in table.items():
                name, target = _entry(stored, layer, "expert", part)
                yield name, replace(target, expert=expert)
        # transformers 5 fuses separate experts, and names Mixtral's module as others do.
        module = layout.gate.format(layer=layer, expert=0).partition(".experts.")[0]
        module = module.replace(".block_sparse_moe", ".mlp")
        self._fused.setdefault(f"{module}.experts", FusedExperts(layer, is_interleaved=False))

    def _refuse(self, name: str, what: str) -> None:
        self._refused[name.removesuffix(".weight")] = what


def _entry(
    stored: Stored, layer: int, kind: Literal["attention", "mlp", "expert"], part: str
) -> tuple[str, AdaptedMatrix]:
    name = stored.name.removesuffix(".weight")
    return name, AdaptedMatrix(layer=layer, kind=kind, part=part, shape=stored.shape)


def _mlp(table: Mapping[str, Stored], layer: int) -> Iterator[tuple[str, AdaptedMatrix]]:
    for key, stored in table.items():
        owner, _, part = key.partition(".")
        if owner in ("shared", "dense") and part in _MLP_PARTS:
            yield _entry(stored, layer, "mlp", part)
