"""Runs texts through a model one layer at a time, with the stages and kernels that serve it.

T tokens, D model width, K choices of a token. Only one layer is in memory; between layers the
residual stream of all tokens is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experts.expert_stage import RoutedRows
from moe_kernels.interface.kernels import ExpertBank
from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import CacheConfig
from moe_serve.learn.predictor_data import Tokens, as_batch
from moe_serve.model.load.loader import ModelLoader
from moe_serve.model.stage.attention_stage import AttentionStage
from moe_serve.model.step_plan import MicroBatch

_TOKENS_AT_ONCE = 4096
_ROWS_AT_ONCE = 256  # of logits


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts that run together."""

    batch: MicroBatch
    num_pages: int

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(np.concatenate([s.token_ids for s in self.batch.slices]))


def make_batches(texts: Sequence[Tokens]) -> list[TokenBatch]:
    """Groups texts, each read from its start, into batches of about 4 096 tokens."""
    batches: list[TokenBatch] = []
    group: list[Tokens] = []
    size = 0
    for text in texts:
        if group and size + len(text) > _TOKENS_AT_ONCE:
            batches.append(_as_batch(group))
            group, size = [], 0
        group.append(text)
        size += len(text)
    return [*batches, _as_batch(group)] if group else batches


def _as_batch(texts: Sequence[Tokens]) -> TokenBatch:
    batch = as_batch(texts, CacheConfig().page_size)
    return TokenBatch(batch, 1 + max(batch.slices[-1].page_table))


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """Rows that enter a layer's experts: `x_TD`, normed, for a shared expert or a dense MLP, and
    `routed` for the routed experts; None in a dense layer.
    """

    x_TD: Tensor
    routed: RoutedRows | None


class HiddenStates:
    """The residual stream of texts on their way through the layers."""

    def __init__(self, batches: Sequence[TokenBatch], parts: Sequence[Tensor]) -> None:
        self.batches, self.parts = batches, list(parts)

    @classmethod
    def embed(cls, loader: ModelLoader, batches: Sequence[TokenBatch]) -> HiddenStates:
        """Starts with the embeddings of the tokens."""
        embedding, multiplier = loader.embedding(), loader.spec.embedding_multiplier
        parts = [F.embedding(batch.token_ids, embedding) for batch in batches]
        return cls(batches, parts if multiplier == 1.0 else [p * multiplier for p in parts])

    def copy(self) -> HiddenStates:
        """Returns the same states, for a second run through the layers."""
        return HiddenStates(self.batches, self.parts)

    @torch.inference_mode()
    def attend(self, stage: AttentionStage) -> None:
        """Passes the attention of the stage's layer."""
        device = torch.device("cpu")
        most = max(batch.num_pages for batch in self.batches)
        page_size = CacheConfig().page_size
        cache = KVCache(stage.spec, most, page_size, stage.dtype, device)
        for index, batch in enumerate(self.batches):
            inputs = stage.make_inputs(batch.batch, cache, device)
            self.parts[index] = stage.attend(0, self.parts[index], inputs, cache)

    @torch.inference_mode()
    def expert_inputs(self, stage: AttentionStage) -> ExpertInputs:
        """Returns what enters the experts of the stage's layer, after its attention."""
        x_TD = torch.cat([stage.moe_normed(0, part) for part in self.parts])
        if not stage.spec.layers[0].is_sparse:
            return ExpertInputs(x_TD, None)
        rows = [stage.route(0, part).rows for part in self.parts]
        is_same = not stage.spec.router.is_weighing_inputs
        return ExpertInputs(
            x_TD,
            RoutedRows(
                x_TD if is_same else torch.cat([each.x_TD for each in rows]),
                torch.cat([each.expert_ids_TK for each in rows]),
                torch.cat([each.weights_TK for each in rows]),
            ),
        )

    @torch.inference_mode()
    def feed_forward(self, stage: AttentionStage, bank: ExpertBank | None) -> list[Tensor]:
        """Passes the layer's experts, `bank`, or its dense MLP, and returns the choices [T, K] of
        each part.
        """
        choices = []
        for index, part in enumerate(self.parts):
            if bank is None:
                self.parts[index] = stage.dense(0, part)
                continue
            routed = stage.route(0, part)
            rows = routed.rows
            out_TD = bank(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
            self.parts[index] = stage.add(part, out_TD, stage.shared(0, routed.x_TD))
            choices.append(rows.expert_ids_TK)
        return choices

    def pieces(self) -> Iterator[Tensor]:
        """Yields the states of all tokens in order, a few rows at a time."""
        for part in self.parts:
            yield from part.split(_ROWS_AT_ONCE)


class OutputHead:
    """The final norm and the output head of a model."""

    def __init__(self, loader: ModelLoader) -> None:
        self._spec, self._kernels = loader.spec, loader.kernels
        self._head, self._norm = loader.output_head(), loader.final_norm()

    @torch.inference_mode()
    def log_probabilities(self, hidden_TD: Tensor) -> Tensor:
        """Returns the logarithms of the next token's probabilities [T, V], in fp32."""
        normed = self._kernels.rms_norm(hidden_TD, self._norm, self._spec.norm_eps)
        return (self._head(normed).float() / self._spec.logits_divisor).log_softmax(-1)


def layer_stage(loader: ModelLoader, layer: int, max_positions: int) -> AttentionStage:
    """Loads one layer as a stage of a single layer, without embedding and head."""
    return AttentionStage(
        replace(loader.spec, layers=(loader.spec.layers[layer],)),
        loader.kernels,
        embedding=torch.empty(0, loader.spec.width, dtype=loader.dtype),
        layers=loader.attention_layers(max_positions, layers=[layer]),
        final_norm=loader.final_norm(),
        head=_no_head,
    )


def _no_head(x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
    """Stands for the head of a stage of one layer, which computes no logits."""
    raise AssertionError("a stage of one layer has no head")


def base_bank(loader: ModelLoader, layer: int) -> ExpertBank | None:
    """Loads the routed experts of a layer as they are stored; None for a dense layer."""
    if not loader.spec.layers[layer].is_sparse:
        return None
    return loader.expert_bank(layer, range(loader.spec.router.num_experts))
