"""From a checkpoint folder to the two stages. Each stage reads only the tensors it needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from experts.expert_stage import ExpertStage
from experts.layer_banks import LayerBanks
from moe_kernels.choice import KernelsName, choose_kernels, default_num_threads
from moe_kernels.kernels import ExpertBank, ExpertWeights, Kernels
from moe_serve.errors import CheckpointError
from moe_serve.model.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.checkpoint import Checkpoint
from moe_serve.model.dense_mlp import DenseMLP
from moe_serve.model.expert_choice import Router
from moe_serve.model.families import Family, family_of
from moe_serve.model.hf_config import HFConfig
from moe_serve.model.load_attention import AttentionLoader
from moe_serve.model.manifest import (
    Stored,
    Table,
    all_tensors,
    attention_table,
    expert_table,
    feed_forward_table,
    model_table,
)
from moe_serve.model.spec import ModelSpec
from moe_serve.model.spec_check import check_spec
from moe_serve.model.tensor_names import ExpertNames, TensorNames
from moe_serve.model.weight_reader import WeightReader

LoadProgress = Callable[[int, int], None]  # (tensors read, tensors in all)


class ModelLoader:
    """Reads one checkpoint. Construction reads the config and checks every tensor's header."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        kernels: KernelsName = "auto",
        num_threads: int | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        config = HFConfig.read(folder)
        family: Family = family_of(config)
        config = config.text()
        self.spec: ModelSpec = family.read_spec(config)
        check_spec(self.spec, config)
        self._num_threads = num_threads or default_num_threads()
        self._reader = WeightReader(Checkpoint(folder), config)
        self._names = family.names_in(self._reader.has)
        self._experts = _expert_names(self._names, self.spec, self._reader)
        self._total, self._done, self._progress = 0, 0, progress
        for item in all_tensors(self._names, self._experts, self.spec):
            self._reader.expect(item.name, item.shape)
            self._total += 1
        self.dtype: torch.dtype = dtype or self._own_dtype()
        self.device = device or torch.device("cpu")
        self.kernels: Kernels = choose_kernels(self.device, self.dtype, kernels, num_threads)
        self._lock = threading.Lock()

    @property
    def weight_format(self) -> str:
        """How the checkpoint stores its weights, for logs."""
        return self._reader.format_name

    def _own_dtype(self) -> torch.dtype:
        """As the config states, else as the embedding is stored."""
        if self.spec.dtype is not None:
            stated: torch.dtype = getattr(torch, self.spec.dtype)
            return stated
        return self._reader.stored_dtype(self._names.embedding)

    def attention_stage(self, max_positions: int) -> AttentionStage:
        """Everything but the routed experts."""
        spec = self.spec
        table = model_table(self._names, spec)
        embedding = self._keep(table["embedding"])
        bias = self._keep(table["head_bias"]) if spec.has_head_bias else None
        weight = embedding if spec.is_head_tied else self._read(table["head"])
        head = self.kernels.linear(weight, bias)
        if not spec.is_head_tied:
            self._reader.done(table["head"].name)
        attention = AttentionLoader(spec, self.kernels, max_positions, self.device)
        return AttentionStage(
            spec,
            self.kernels,
            embedding=embedding,
            layers=[self._attention_layer(layer, attention) for layer in range(spec.num_layers)],
            final_norm=self._keep(table["final_norm"]),
            head=head,
        )

    def routers(self) -> list[Router | None]:
        """The routers alone, for an expert side that routes; None: a dense layer."""
        tables = [
            feed_forward_table(self._names, self.spec, layer)
            for layer in range(self.spec.num_layers)
        ]
        return [self._router(table) for table in tables]

    def expert_stage(self, held: Sequence[Collection[int]] | None = None) -> ExpertStage:
        """The routed experts of all layers, or those of each layer that `held` names. Only their
        tensors are read."""
        num_layers = self.spec.num_layers
        if held is None:
            held = [range(self.spec.router.num_experts)] * num_layers
        assert len(held) == num_layers, f"experts of {len(held)} layers, not {num_layers}"
        with ThreadPoolExecutor(self._num_threads) as pool:  # copying is what takes time
            return ExpertStage(list(pool.map(self._layer_banks, range(num_layers), held)))

    def expert_bank(self, layer: int, experts: Collection[int]) -> ExpertBank:
        """Some routed experts of a layer, at least one. May be called again for others."""
        reading = _LayerExperts(self, layer, frozenset(experts))
        bank = self.kernels.experts(reading, self.spec.activation)
        reading.done()
        return bank

    def _layer_banks(self, layer: int, experts: Collection[int]) -> LayerBanks | None:
        spec = self.spec
        if not spec.layers[layer].is_sparse:
            return None
        banks = LayerBanks(spec.router.num_experts, spec.width, self.device)
        if experts:
            banks.put(self.expert_bank(layer, experts), experts)
        return banks

    def _attention_layer(self, layer: int, attention: AttentionLoader) -> AttentionLayer:
        table = attention_table(self._names, self.spec, layer)
        feed = feed_forward_table(self._names, self.spec, layer)
        weights = {key: self._read(item) for key, item in table.items()}
        result = AttentionLayer(
            attention_norm=weights["attention_norm"].clone(),
            attention=attention.load(layer, weights),
            output=self.kernels.linear(weights["o"], weights.get("o_bias")),
            moe_norm=self._keep(feed["moe_norm"]),
            router=self._router(feed),
            mlp=self._dense_mlp(feed),
        )
        for item in table.values():
            self._reader.done(item.name)
        return result

    def _router(self, table: Table) -> Router | None:
        if "router" not in table:
            return None
        bias, selection_bias = (
            self._keep(table[key], torch.float32) if key in table else None
            for key in ("router_bias", "selection_bias")
        )
        return Router(
            linear=self.kernels.router_linear(self._keep(table["router"], torch.float32), bias),
            selection_bias_E=None if selection_bias is None else selection_bias.flatten(),
        )

    def _dense_mlp(self, table: Table) -> DenseMLP | None:
        """The shared expert of a sparse layer, or a dense layer's MLP."""
        prefix = "shared." if "router" in table else "dense."
        parts = {k.removeprefix(prefix): v for k, v in table.items() if k.startswith(prefix)}
        if not parts:
            return None
        weights = {key: self._read(item) for key, item in parts.items()}
        for key in ("gate_up", "gate_up_bias"):
            if key in weights:
                halves = weights[key].chunk(2)
                weights |= {
                    key.replace("gate_up", k): v
                    for k, v in zip(("gate", "up"), halves, strict=True)
                }
        expert = ExpertWeights(
            weights["gate"],
            weights["up"],
            weights["down"],
            *(weights.get(key) for key in ("gate_bias", "up_bias", "down_bias")),
        )
        bank = self.kernels.experts([expert], self.spec.activation)
        for item in parts.values():
            self._reader.done(item.name)
        gate = table.get("shared_gate")
        if gate is None:
            return DenseMLP(bank=bank)
        return DenseMLP(bank=bank, gate=self.kernels.router_linear(self._keep(gate, torch.float32)))

    def drop_expert(self, layer: int, expert: int) -> None:
        """An expert has been copied: its pages may go."""
        for item in expert_table(self._experts, self.spec, layer, expert).values():
            self._reader.done(item.name, None if self._experts.gate else expert)

    def read_expert(self, layer: int, expert: int) -> ExpertWeights:
        """One routed expert. May be views of the file."""
        names = self._experts
        table = expert_table(names, self.spec, layer, expert)
        if names.gate:
            return ExpertWeights(*(self._read(table[key]) for key in ("gate", "up", "down")))
        weights = {key: self._read(item, expert=expert) for key, item in table.items()}
        if names.is_transposed:
            weights |= {key: weights[key].t() for key in ("gate_up", "down")}
        gate, up = _gate_and_up(weights["gate_up"], names)
        if not self.spec.has_expert_bias:
            return ExpertWeights(gate, up, weights["down"])
        biases = _gate_and_up(weights["gate_up_bias"], names)
        return ExpertWeights(gate, up, weights["down"], *biases, weights["down_bias"])

    def _read(
        self, stored: Stored, dtype: torch.dtype | None = None, expert: int | None = None
    ) -> Tensor:
        """May be a view of the file: copy it, or make a layer of it, before `done`."""
        tensor = self._reader.read(stored.name, stored.shape, dtype or self.dtype, expert)
        with self._lock:
            self._done += 0 if expert else 1  # a fused tensor counts once
            if self._progress is not None:
                self._progress(self._done, self._total)
        return tensor.to(self.device)

    def _keep(self, stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one's own."""
        tensor = self._read(stored, dtype).clone()
        self._reader.done(stored.name)
        return tensor


class _LayerExperts(Sequence[ExpertWeights | None]):
    """A layer's experts, each read when it is asked for; the one before is then let go.

    So no more than one expert is in memory twice, dequantised and packed. None: it is not held.
    """

    def __init__(self, loader: ModelLoader, layer: int, held: frozenset[int]) -> None:
        most = loader.spec.router.num_experts
        assert held and 0 <= min(held) <= max(held) < most, f"experts {sorted(held)} of {most}"
        self._loader, self._layer, self._held = loader, layer, held
        self._read: int | None = None

    @property
    def num_held(self) -> int:
        """See moe_kernels.kernels.LazyExperts."""
        return len(self._held)

    def __len__(self) -> int:
        return self._loader.spec.router.num_experts

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
        return self._loader.read_expert(self._layer, index)

    def done(self) -> None:
        """Let go of what was read last."""
        if self._read is not None:
            self._loader.drop_expert(self._layer, self._read)
            self._read = None


def _gate_and_up(fused: Tensor, names: ExpertNames) -> tuple[Tensor, Tensor]:
    """Rows of the gate and of the up projection, from [2 F, ...]."""
    if names.is_interleaved:
        return fused[0::2], fused[1::2]
    gate, up = fused.chunk(2)
    return gate, up


def _expert_names(names: TensorNames, spec: ModelSpec, reader: WeightReader) -> ExpertNames:
    """The layout that this checkpoint has; the first, to complain of, if it has none.

    Two layouts may differ in nothing but their shapes.
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


def _is_as_expected(stored: Stored, reader: WeightReader) -> bool:
    try:
        reader.expect(stored.name, stored.shape)
    except CheckpointError:
        return False
    return True
