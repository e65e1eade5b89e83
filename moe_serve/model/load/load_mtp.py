"""Loads the layer that a checkpoint ships for predicting the token behind the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.model.checkpoint.manifest import model_table
from moe_serve.model.families.mtp import MTPLayer
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.stage.mtp_stage import Fusion, MTPPart, MTPStage, num_own_pages


@dataclass(frozen=True, slots=True)
class MTPLoader:
    """Loads the layer with all its experts. `open` makes the loader."""

    layer: MTPLayer
    own: ModelLoader
    model: ModelLoader

    @classmethod
    def open(cls, model: ModelLoader, layer: MTPLayer) -> MTPLoader:
        """Checks the headers of the layer's tensors. Raises CheckpointError."""
        layer = layer.after(model.prefix)
        return cls(layer, model.beside(layer), model)

    def load(self, stage: AttentionStage, cache: KVCache, max_positions: int) -> MTPPart:
        """Loads the layer, and makes its keys and values for the pages of `cache`.

        It shares the embedding and the head of `stage` unless the checkpoint has others.
        """
        own, table = self.own, self.layer.fusion_table()
        weights = {key: own.tensor(stored) for key, stored in table.items()}
        embedding, head = self._own_matrix("embedding"), self._own_matrix("head")
        decoder = AttentionStage(
            self.layer.spec,
            own.kernels,
            embedding=stage.embedding if embedding is None else embedding,
            layers=own.attention_layers(max_positions),
            final_norm=weights["final_norm"],
            head=stage.head if head is None else own.kernels.linear(head),
        )
        fusion = Fusion(
            token_norm_D=weights["token_norm"],
            state_norm_D=weights["state_norm"],
            projection=own.kernels.linear(weights["projection"]),
        )
        beside = cache.beside(self.layer.spec, num_own_pages(cache.page_size))
        return MTPPart(
            MTPStage(stage, fusion, decoder, own.expert_stage()),
            beside,
            own_pages=range(cache.num_pages + 1, beside.num_pages + 1),
            max_positions=max_positions,
        )

    def _own_matrix(self, key: str) -> Tensor | None:
        """Loads the layer's embedding or head; None if it is absent or a copy of the model's."""
        own, model = (
            model_table(each.names, each.spec).get(key) for each in (self.own, self.model)
        )
        reader, dtype = self.own.reader, self.own.dtype
        if own is None or model is None or own == model or not reader.has(own.name):
            return None
        reader.expect(own.name, own.shape)
        weight, other = (reader.read(each.name, each.shape, dtype) for each in (own, model))
        found = None if torch.equal(weight, other) else weight.clone().to(self.own.device)
        for each in (own, model):
            reader.done(each.name)
        return found
