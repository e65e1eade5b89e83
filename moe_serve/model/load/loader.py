"""Loads the two stages from a checkpoint folder. Each stage reads only the tensors it needs."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from experts.expert_layer import LayerBanks
from experts.expert_stage import ExpertStage
from moe_kernels.interface.kernels import ExpertBank, ExpertWeights, Kernels, Linear
from moe_kernels.interface.quantised_matrix import LowBitProducts, Weight, selected_rows
from moe_kernels.kernel_choice import KernelsName, choose_kernels, default_num_threads
from moe_serve.config.sections import WeightsName
from moe_serve.errors import CheckpointError
from moe_serve.model.checkpoint.hf_config import HFConfig, check_spec
from moe_serve.model.checkpoint.manifest import (
    Stored,
    Table,
    all_tensors,
    attention_table,
    feed_forward_table,
    layer_tensors,
    model_table,
)
from moe_serve.model.families import Family, family_of
from moe_serve.model.families.mtp import MTPLayer
from moe_serve.model.load.expert_packing import ExpertPacking
from moe_serve.model.load.linear_packing import LinearPacking, weights_description
from moe_serve.model.load.load_attention import AttentionLoader
from moe_serve.model.load.load_expert_memory import MemoryBudget, memory_stage, room_stage
from moe_serve.model.load.load_experts import ExpertLoader, expert_names
from moe_serve.model.load.weight_reader import (
    LoadProgress,
    ModelTensors,
    OpenWeights,
    open_checkpoint,
)
from moe_serve.model.spec import ModelSpec
from moe_serve.model.stage.attention import GroupedQueryAttention
from moe_serve.model.stage.attention_stage import AttentionLayer, AttentionStage
from moe_serve.model.stage.feed_forward import DenseMLP, Router
from moe_serve.model.stage.gather import (
    Gather,
    GatheredAttention,
    GatheredHead,
    GatheredLinear,
    GatheredMLP,
    with_row_norm,
)


class ModelLoader:
    """Reads one checkpoint. The constructor reads the config and checks every tensor's header."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        kernels: KernelsName = "auto",
        num_threads: int | None = None,
        expert_weights: WeightsName = "auto",
        linear_weights: WeightsName = "auto",
        low_bit_products: LowBitProducts = "exact",
        progress: LoadProgress | None = None,
        open_weights: OpenWeights = open_checkpoint,
    ) -> None:
        config = HFConfig.read(folder)
        family: Family = family_of(config)
        config = config.text()
        self.spec: ModelSpec = family.read_spec(config)
        check_spec(self.spec, config)
        self._folder, self._num_threads = folder, num_threads or default_num_threads()
        self.reader = open_weights(folder, config)
        self.prefix = family.prefix_in(self.reader.has)  # before the names of all tensors
        self.names = family.names.after(self.prefix)
        experts = expert_names(self.names, self.spec, self.reader)
        num_tensors = 0
        for item in all_tensors(self.names, experts, self.spec):
            self.reader.expect(item.name, item.shape)
            num_tensors += 1
        self.dtype: torch.dtype = dtype or self._own_dtype()
        self.device = device or torch.device("cpu")
        self.kernels: Kernels = choose_kernels(
            self.device, self.dtype, kernels, num_threads, low_bit_products
        )
        self._packing = ExpertPacking(self.reader, self.kernels, expert_weights, self.dtype)
        self._linears = LinearPacking(self.reader, self.kernels, linear_weights)
        self._tensors = ModelTensors(self.reader, self.dtype, self.device, num_tensors, progress)
        self._experts = ExpertLoader(self.spec, experts, self._tensors, self._packing)
        self._linears.decide(model_table(self.names, self.spec))
        self._linears.decide_layers(self.names, self.spec)

    def beside(self, layer: MTPLayer) -> ModelLoader:
        """Returns a loader of a layer that predicts further tokens, from the same checkpoint.

        Checks the header of its tensors. Raises CheckpointError if there is no such layer.
        """
        spec, names, reader = layer.spec, layer.names.layer, self.reader
        if not reader.has(layer.names.projection):
            raise CheckpointError(
                f"speculation.method is 'mtp', but {self._folder} has no weights of an MTP layer "
                f"({layer.names.projection} is missing): use a checkpoint with them, or set it to "
                "'auto' or 'off'."
            )
        other, experts = copy.copy(self), expert_names(names, spec, reader)
        for item in (*layer.fusion_table().values(), *layer_tensors(names, experts, spec, 0)):
            reader.expect(item.name, item.shape)
        modes: list[WeightsName] = [
            "auto" if p.mode == "packed" else p.mode for p in (self._packing, self._linears)
        ]
        other.spec, other.names = spec, names
        other._packing = ExpertPacking(reader, self.kernels, modes[0], self.dtype)
        other._linears = LinearPacking(reader, self.kernels, modes[1])
        other._linears.decide_layers(names, spec)
        other._tensors = ModelTensors(reader, self.dtype, self.device, 0, progress=None)
        other._experts = ExpertLoader(spec, experts, other._tensors, other._packing)
        return other

    def tensor(self, stored: Stored) -> Tensor:
        """Loads one weight."""
        return self._tensors.keep(stored)

    @property
    def weight_format(self) -> str:
        """The format of the stored weights, for logs."""
        return self.reader.format_name

    @property
    def expert_weights(self) -> str:
        """The way the weights of a quantised checkpoint are held, for logs."""
        return weights_description(self._packing, self._linears, self.dtype)

    def _own_dtype(self) -> torch.dtype:
        """Returns the config's dtype, or else the stored embedding's."""
        if self.spec.dtype is not None:
            stated: torch.dtype = getattr(torch, self.spec.dtype)
            return stated
        return self.reader.stored_dtype(self.names.embedding)

    def attention_stage(self, max_positions: int, gather: Gather | None = None) -> AttentionStage:
        """Loads everything except the routed experts. With `gather`, it loads this shard's part of
        every layer.
        """
        spec = self.spec if gather is None else gather.shard.spec(self.spec)
        table = model_table(self.names, spec)
        # The head first: while it is packed, its stored pages are in memory too.
        head = None if spec.is_head_tied else self.output_head(gather=gather)
        embedding = self._tensors.keep(table["embedding"])
        return AttentionStage(
            spec,
            self.kernels,
            embedding=embedding,
            layers=self.attention_layers(max_positions, gather),
            final_norm=self._tensors.keep(table["final_norm"]),
            head=self.output_head(embedding, gather) if head is None else head,
        )

    def attention_layers(
        self,
        max_positions: int,
        gather: Gather | None = None,
        layers: Collection[int] | None = None,
    ) -> list[AttentionLayer]:
        """Loads some layers, or all, without their routed experts."""
        spec = self.spec if gather is None else gather.shard.spec(self.spec)
        attention = AttentionLoader(spec, self.kernels, max_positions, self.device)
        numbers = range(spec.num_layers) if layers is None else layers
        return [self._attention_layer(layer, attention, gather) for layer in numbers]

    def output_head(self, embedding: Tensor | None = None, gather: Gather | None = None) -> Linear:
        """Loads the output head; `embedding` is its matrix if they are tied."""
        table = model_table(self.names, self.spec)
        bias = self._tensors.keep(table["head_bias"]) if self.spec.has_head_bias else None
        if self.spec.is_head_tied:
            return self.head(self.embedding() if embedding is None else embedding, bias, gather)
        head = self.head(self._linears.matrix(table["head"], self._tensors), bias, gather)
        self._tensors.done(table["head"])
        return head

    def routers(self) -> list[Router | None]:
        """Loads the routers alone, for an expert side that routes; None for dense layers."""
        tables = [
            feed_forward_table(self.names, self.spec, layer)
            for layer in range(self.spec.num_layers)
        ]
        return [self._router(table) for table in tables]

    def embedding(self) -> Tensor:
        """Loads the token embeddings alone, [V, D]."""
        return self._tensors.keep(model_table(self.names, self.spec)["embedding"])

    def output_matrix(self) -> Tensor:
        """Loads the matrix of the output head alone, [V, D]; the embedding if they are tied."""
        key = "embedding" if self.spec.is_head_tied else "head"
        return self._tensors.keep(model_table(self.names, self.spec)[key])

    def final_norm(self) -> Tensor:
        """Loads the weights of the final norm alone, [D]."""
        return self._tensors.keep(model_table(self.names, self.spec)["final_norm"])

    def router_weights(self, layer: int) -> Mapping[str, Tensor]:
        """Loads the tensors that a layer routes with: moe_norm, and in fp32 router and, if present,
        router_bias and selection_bias.
        """
        table = feed_forward_table(self.names, self.spec, layer)
        weights = {"moe_norm": self._tensors.keep(table["moe_norm"])}
        for key in ("router", "router_bias", "selection_bias"):
            if key in table:
                weights[key] = self._tensors.keep(table[key], torch.float32)
        return weights

    def expert_stage(
        self,
        held: Sequence[Collection[int]] | None = None,
        budget: MemoryBudget | None = None,
    ) -> ExpertStage:
        """Loads the routed experts of all layers, or those that `held` names for each layer.

        Only their tensors are read; with a `budget`, they are read when needed.
        """
        num_layers = self.spec.num_layers
        if held is None:
            held = [range(self.spec.router.num_experts)] * num_layers
        assert len(held) == num_layers, f"experts of {len(held)} layers, not {num_layers}"
        if budget is not None:
            return memory_stage(self.spec, self.kernels, self.live_experts(), held, budget)
        with ThreadPoolExecutor(self._num_threads) as pool:  # copying takes most of the time
            return ExpertStage(list(pool.map(self._layer_banks, range(num_layers), held)))

    def expert_room(self, held: Sequence[Collection[int]], num_slots: int) -> ExpertStage:
        """Loads experts as `expert_stage` does, into slots: experts may be exchanged for others
        later.

        Slots beyond the number of experts in `held` are room for further copies.
        """
        arguments = (self.spec, self.kernels, self._experts, held, num_slots)
        return room_stage(*arguments, self.device, self._num_threads)

    def live_experts(self) -> ExpertLoader:
        """Returns a reader of routed experts for use while requests run, on any thread.

        A disk error raises an exception instead of ending the process.
        """
        tensors = ModelTensors(self.reader.copying(), self.dtype, self.device, 0, progress=None)
        return self._experts.with_tensors(tensors)

    def expert_bank(self, layer: int, experts: Collection[int]) -> ExpertBank:
        """Loads some routed experts of a layer, at least one. May be called again for others."""
        reading = self._experts.layer(layer, experts)
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

    def head(self, weight: Weight, bias: Tensor | None, gather: Gather | None) -> Linear:
        """Makes an output head, or a shard's part of one."""
        if gather is None:
            return self.kernels.linear(weight, bias)
        own = gather.shard.columns(len(weight))
        part = self.kernels.linear(selected_rows(weight, own), None if bias is None else bias[own])
        return GatheredHead(part, len(weight), gather)

    def _attention_layer(
        self, layer: int, attention: AttentionLoader, gather: Gather | None
    ) -> AttentionLayer:
        table = attention_table(self.names, self.spec, layer)
        feed = feed_forward_table(self.names, self.spec, layer)
        weights = self._linears.attention_weights(table, self._tensors)
        if gather is not None:
            weights = gather.shard.attention(weights, self.spec, layer)
        output: Linear = self.kernels.linear(weights.matrices["o"], weights.tensors.get("o_bias"))
        heads = attention.load(layer, weights)
        is_row_normed = self.spec.layers[layer].attention.qk_norm == "row"
        if gather is not None and is_row_normed and isinstance(heads, GroupedQueryAttention):
            norm = attention.norm_weights(layer, weights.tensors)
            heads = with_row_norm(heads, norm, gather)
        result = AttentionLayer(
            attention_norm=weights.tensors["attention_norm"].clone(),
            attention=heads if gather is None else GatheredAttention(heads, gather),
            output=output if gather is None else GatheredLinear(output, self.spec.width, gather),
            moe_norm=self._tensors.keep(feed["moe_norm"]),
            router=self._router(feed),
            mlp=self._dense_mlp(feed, gather),
        )
        for item in table.values():
            self._tensors.done(item)
        return result

    def _router(self, table: Table) -> Router | None:
        if "router" not in table:
            return None
        bias, selection_bias = (
            self._tensors.keep(table[key], torch.float32) if key in table else None
            for key in ("router_bias", "selection_bias")
        )
        weight = self._tensors.keep(table["router"], torch.float32)
        return Router(
            linear=self.kernels.router_linear(weight, bias),
            selection_bias_E=None if selection_bias is None else selection_bias.flatten(),
        )

    def _dense_mlp(self, table: Table, gather: Gather | None) -> DenseMLP | None:
        """Loads the shared expert of a sparse layer, or a dense layer's MLP."""
        prefix = "shared." if "router" in table else "dense."
        parts = {k.removeprefix(prefix): v for k, v in table.items() if k.startswith(prefix)}
        if not parts:
            return None
        bank = self._bank_of_one(self._experts.dense(parts), gather)
        for item in parts.values():
            self._tensors.done(item)
        gate = table.get("shared_gate")
        if gate is None:
            return DenseMLP(bank=bank)
        weight = self._tensors.keep(gate, torch.float32)
        return DenseMLP(bank=bank, gate=self.kernels.router_linear(weight))

    def _bank_of_one(
        self, weights: ExpertWeights, gather: Gather | None
    ) -> ExpertBank | GatheredMLP:
        kernels, activation = self.kernels, self.spec.activation
        if gather is None:
            return kernels.experts([weights], activation)
        return GatheredMLP(
            part=kernels.split_mlp(gather.shard.mlp(weights), activation),
            hidden_width=weights.gate.shape[0],
            width=self.spec.width,
            gather=gather,
        )
