"""Runs texts through a model and keeps the hidden states and the chosen experts of each layer.

T tokens, L layers with routed experts, K choices, D model width. Runs layer by layer and unfused,
over whole documents, without requests or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_stage import ExpertStage
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import CacheConfig
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayers:
    """Hidden states and choices of the L layers for T tokens, document after document."""

    expert_ids_TLK: NDArray[np.int16]
    before_attention_LTD: Tensor  # the residual stream that enters each layer; fp16, CPU
    before_router_LTD: Tensor  # the same after the layer's attention, before its norm


class HiddenCapture:
    """A model run to capture its hidden states. Owns a cache of `max_tokens` tokens."""

    def __init__(self, stage: AttentionStage, experts: ExpertStage, max_tokens: int) -> None:
        self._stage, self._experts, self._max_tokens = stage, experts, max_tokens
        device = torch.device("cpu")
        page_size = CacheConfig().page_size
        num_pages = -(-max_tokens // page_size) * 2
        self._cache = KVCache(stage.spec, num_pages, page_size, stage.dtype, device)

    def batches(self, documents: Sequence[Tokens]) -> Iterator[list[int]]:
        """Yield indices of documents to run together: at most `max_tokens` tokens, but at least one
        document."""
        batch, size = list[int](), 0
        for index, document in enumerate(documents):
            if batch and size + len(document) > self._max_tokens:
                yield batch
                batch, size = [], 0
            batch.append(index)
            size += len(document)
        if batch:
            yield batch

    @torch.inference_mode()
    def run(self, documents: Sequence[Tokens], *, has_hidden: bool = True) -> CapturedLayers:
        """Pass documents through all layers. Each is read from its start."""
        stage, cache = self._stage, self._cache
        inputs = stage.make_inputs(_as_batch(documents, cache.page_size), cache, cache.device)
        hidden_TD = stage.embed(inputs)
        ids, before, between = list[Tensor](), list[Tensor](), list[Tensor]()
        for layer in range(stage.spec.num_layers):
            entering_TD = hidden_TD.half() if has_hidden else None
            advance = stage.advance(layer, hidden_TD, inputs, cache)
            hidden_TD, routed = advance.hidden_TD, advance.routed
            if routed is None:
                continue
            ids.append(routed.rows.expert_ids_TK)
            if entering_TD is not None:
                before.append(entering_TD)
                between.append(hidden_TD.half())
            rows, experts = routed.rows, self._experts.layer(layer)
            out_TD = experts.total(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
            hidden_TD = stage.add(hidden_TD, out_TD, stage.shared(layer, routed.x_TD))
        return CapturedLayers(
            expert_ids_TLK=torch.stack(ids, 1).to(torch.int16).numpy(),
            before_attention_LTD=torch.stack(before) if before else torch.empty(0),
            before_router_LTD=torch.stack(between) if between else torch.empty(0),
        )


def _as_batch(documents: Sequence[Tokens], page_size: int) -> MicroBatch:
    slices, page = [], 1
    for index, tokens in enumerate(documents):
        num_pages = -(-len(tokens) // page_size)
        slices.append(
            SequenceSlice(
                sequence_id=index,
                start=0,
                token_ids=tokens,
                page_table=tuple(range(page, page + num_pages)),
                num_logits=0,
            )
        )
        page += num_pages
    return MicroBatch(tuple(slices))
