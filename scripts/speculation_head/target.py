"""Runs the model that a head drafts for: reads texts and generates them, and keeps hidden states.

T tokens, B sequences, D model width, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.cache.kv_cache import KVCache
from moe_serve.config.sections import CacheConfig, ModelConfig
from moe_serve.engine.opened_model import OpenedModel, model_folder
from moe_serve.model.speculation_head import SpeculationHead
from moe_serve.model.step_plan import MicroBatch, SequenceSlice

NUM_TOP = 32  # the likeliest tokens that are kept of each position
_TOKENS_AT_ONCE = 4096

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The model's state and choice at T positions."""

    hidden_TD: Tensor  # the residual stream before the final norm, in the model's dtype
    top_ids_TK: Tensor  # int16 or int32: the likeliest next tokens, best first
    top_logits_TK: Tensor  # fp16

    def __len__(self) -> int:
        return len(self.hidden_TD)

    def __getitem__(self, which: slice) -> Rows:
        return Rows(
            hidden_TD=self.hidden_TD[which],
            top_ids_TK=self.top_ids_TK[which],
            top_logits_TK=self.top_logits_TK[which],
        )

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        return cls(
            hidden_TD=torch.cat([part.hidden_TD for part in parts]),
            top_ids_TK=torch.cat([part.top_ids_TK for part in parts]),
            top_logits_TK=torch.cat([part.top_logits_TK for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """The tokens of a text from its first row on, and the rows at these tokens.

    The text goes on for a token behind the last row: `tokens` has one more than there are rows.
    """

    tokens: Tokens
    rows: Rows


class TargetModel:
    """A checkpoint on the CPU. `model` None: the demonstration model."""

    def __init__(self, model: str | None, num_threads: int) -> None:
        config = ModelConfig(path=model, device="cpu")
        self.folder = model_folder(config)
        opened = OpenedModel.open(self.folder, config, num_threads, torch.device("cpu"))
        self._loader, self.spec = opened.loader, opened.spec
        self.eos_token_ids = opened.eos_token_ids
        self._stage = self._loader.attention_stage(self.spec.max_positions)
        self._experts = self._loader.expert_stage()

    def embedding(self) -> Tensor:
        """Returns the embedding [V, D], as stored."""
        return self._loader.embedding()

    def output_matrix(self) -> Tensor:
        """Returns the matrix [V, D] that turns normed rows into logits."""
        return self._loader.output_matrix()

    def final_norm(self) -> Tensor:
        """Returns the weights [D] of the norm before it."""
        return self._loader.final_norm()

    def speculation_head(self, folder: Path) -> SpeculationHead:
        """Loads a head as the server does."""
        return SpeculationHead.load_for(self._stage, folder)

    def read(self, texts: Sequence[Tokens]) -> list[ReadText]:
        """Reads texts from their start, many at once."""
        texts = [text[: self.spec.max_positions] for text in texts]
        longest = max(map(len, texts))
        cache = self._cache(2 * max(longest, _TOKENS_AT_ONCE))
        done = list[ReadText]()
        for batch in _batches(texts):
            slices, first = [], 1
            for text in batch:
                pages = -(-len(text) // cache.page_size)
                slices.append(_slice(first, pages, 0, text))
                first += pages
            hidden_TD = self._states(slices, cache)
            rows = _rows(hidden_TD, self._logits(hidden_TD))
            ends = np.cumsum([len(text) for text in batch])
            for text, end in zip(batch, ends.tolist(), strict=True):
                start = end - len(text)
                done.append(ReadText(tokens=text, rows=rows[start : end - 1]))
        return done

    def generate(
        self, prompts: Sequence[Tokens], count: int, temperatures: Sequence[float], seed: int
    ) -> list[ReadText]:
        """Continue prompts by up to `count` tokens, each until an end token. A text starts with
        the last token of its prompt."""
        page_size = CacheConfig().page_size
        pages = -(-(max(map(len, prompts)) + count) // page_size)
        cache = self._cache(pages * page_size * len(prompts))
        tables = [1 + index * pages for index in range(len(prompts))]
        draw = _Draw(temperatures, seed)
        parts, tokens_SB = list[Rows](), list[Tensor]()
        hidden_BD = torch.cat(
            [
                self._states([_slice(first, pages, 0, prompt)], cache)[-1:]
                for first, prompt in zip(tables, prompts, strict=True)
            ]
        )
        for step in range(count):
            logits_BV = self._logits(hidden_BD)
            parts.append(_rows(hidden_BD, logits_BV))
            tokens_SB.append(draw(logits_BV))
            slices = [
                _slice(first, pages, len(prompt) + step, token.numpy())
                for first, prompt, token in zip(
                    tables, prompts, tokens_SB[-1].split(1), strict=True
                )
            ]
            hidden_BD = self._states(slices, cache)
        rows_SB, tokens = Rows.joined(parts), torch.stack(tokens_SB).numpy()
        return [
            self._until_end(
                np.concatenate((prompt[-1:], tokens[:, row])), rows_SB[row :: len(prompts)]
            )
            for row, prompt in enumerate(prompts)
        ]

    def _until_end(self, tokens: Tokens, rows: Rows) -> ReadText:
        ends = np.flatnonzero(np.isin(tokens[1:], list(self.eos_token_ids)))
        count = int(ends[0]) + 1 if len(ends) else len(tokens) - 1
        return ReadText(tokens=tokens[: count + 1], rows=rows[:count])

    def _cache(self, num_tokens: int) -> KVCache:
        page_size = CacheConfig().page_size
        pages = -(-num_tokens // page_size)
        return KVCache(self.spec, pages, page_size, self._stage.dtype, torch.device("cpu"))

    @torch.inference_mode()
    def _states(self, slices: Sequence[SequenceSlice], cache: KVCache) -> Tensor:
        """Returns the residual stream [T, D] behind the last layer."""
        stage = self._stage
        inputs = stage.make_inputs(MicroBatch(tuple(slices)), cache, cache.device)
        hidden_TD = stage.embed(inputs)
        for layer in range(stage.spec.num_layers):
            advance = stage.advance(layer, hidden_TD, inputs, cache)
            hidden_TD, routed = advance.hidden_TD, advance.routed
            if routed is None:
                continue
            rows, experts = routed.rows, self._experts.layer(layer)
            out_TD = experts.total(rows.x_TD, rows.expert_ids_TK, rows.weights_TK)
            hidden_TD = stage.add(hidden_TD, out_TD, stage.shared(layer, routed.x_TD))
        return hidden_TD

    @torch.inference_mode()
    def _logits(self, hidden_TD: Tensor) -> Tensor:
        return self._stage.logits(hidden_TD, torch.arange(len(hidden_TD)))


class _Draw:
    """Draws a token for each row, by the row's temperature."""

    def __init__(self, temperatures: Sequence[float], seed: int) -> None:
        self._temperatures_B1 = torch.tensor(temperatures)[:, None]
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        noise_BV = torch.empty_like(logits_BV).exponential_(generator=self._generator)
        gumbel_BV = -noise_BV.clamp_min(1e-20).log()
        return (logits_BV + self._temperatures_B1 * gumbel_BV).argmax(1)


def _rows(hidden_TD: Tensor, logits_TV: Tensor) -> Rows:
    num_tokens = logits_TV.shape[1]
    top_TK = logits_TV.topk(min(NUM_TOP, num_tokens), dim=1)
    kind = torch.int16 if num_tokens <= 2**15 else torch.int32
    return Rows(
        hidden_TD=hidden_TD,
        top_ids_TK=top_TK.indices.to(kind),
        top_logits_TK=top_TK.values.half(),
    )


def _batches(texts: Sequence[Tokens]) -> Iterator[list[Tokens]]:
    batch, size = list[Tokens](), 0
    for text in texts:
        if batch and size + len(text) > _TOKENS_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _slice(first_page: int, pages: int, start: int, tokens: Tokens) -> SequenceSlice:
    return SequenceSlice(
        sequence_id=first_page,
        start=start,
        token_ids=tokens,
        page_table=tuple(range(first_page, first_page + pages)),
        num_logits=0,
    )
