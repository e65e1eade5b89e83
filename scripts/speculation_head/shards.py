"""Makes the training data of a head: files of tokens, hidden states and choices of the model.

A shard is either read (texts as they are) or generated (texts that the model continues). Making
shards may stop at any time and goes on with the first one that is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo_model.corpus import chats_of, render_chat
from moe_serve.learn.documents import Document, TextPiece, cut_into_pieces, read_documents
from moe_serve.text.tokenizer import Tokenizer

from .target import ReadText, Rows, TargetModel, Tokens

MAX_LOOP_PERIOD, MIN_LOOP_TOKENS = 32, 64
_MAX_ALL_TOKENS = 10**9
_PROMPT_TOKENS = (24, 160)  # of generated texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sizes of the data. Of every `cycle` shards, `num_generated` are generated."""

    read_tokens: int = 131_072  # of a read shard
    batch: int = 160  # sequences that are generated together
    count: int = 256  # tokens of a generated text, at most
    batches: int = 3  # of a generated shard
    cycle: int = 2
    num_generated: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.0, 1.0)
    seed: int = 20261124


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """T positions. `text_T` numbers the texts: positions of one follow each other."""

    tokens_T: Tensor  # int32
    text_T: Tensor  # int32
    rows: Rows

    def write(self, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        tensors = {
            "tokens": self.tokens_T,
            "text": self.text_T,
            "hidden": self.rows.hidden_TD,
            "top_ids": self.rows.top_ids_TK,
            "top_logits": self.rows.top_logits_TK,
        }
        save_file(tensors, temporary)
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> Shard:
        tensors = load_file(path)
        return cls(
            tokens_T=tensors["tokens"],
            text_T=tensors["text"],
            rows=Rows(
                hidden_TD=tensors["hidden"],
                top_ids_TK=tensors["top_ids"],
                top_logits_TK=tensors["top_logits"],
            ),
        )

    @classmethod
    def of(cls, texts: Sequence[ReadText]) -> Shard:
        tokens = np.concatenate([text.tokens[: len(text.rows)] for text in texts])
        numbers = np.repeat(np.arange(len(texts)), [len(text.rows) for text in texts])
        return cls(
            tokens_T=torch.from_numpy(tokens.astype(np.int32)),
            text_T=torch.from_numpy(numbers.astype(np.int32)),
            rows=Rows.joined([text.rows for text in texts]),
        )


def shard_paths(work: Path) -> list[Path]:
    """Returns the shards that are there."""
    return sorted(work.glob("shard-*.safetensors"))


def read_pieces(
    corpus: Path, split: str, tokenizer: Tokenizer, has_chats: bool, seed: int
) -> list[TextPiece]:
    """Returns the texts of a split in random order; the label of a text is its folder.

    `has_chats`: questions and answers come once more as chats.
    """
    documents = read_documents([corpus], split)
    if has_chats:
        chats = [render_chat(turns) for each in documents for turns in chats_of(each.text)]
        documents += [Document(text, "chat") for text in chats]
    return cut_into_pieces(documents, tokenizer, _MAX_ALL_TOKENS, 10**6, seed)


def make_shards(
    target: TargetModel, pieces: Sequence[TextPiece], work: Path, recipe: Recipe, most: int
) -> None:
    """Makes shards up to number `most`; logs a line for each."""
    work.mkdir(parents=True, exist_ok=True)
    reading = _batches(pieces, recipe.read_tokens)
    rng = np.random.default_rng(recipe.seed)
    for number in range(most):
        path, since = work / f"shard-{number:04}.safetensors", time.monotonic()
        seed = int(rng.integers(2**31))
        is_read = number % recipe.cycle >= recipe.num_generated
        batch = next(reading, None) if is_read else None  # None: generated
        if path.exists():
            continue
        if batch is None:
            texts = _generated(target, pieces, recipe, seed)
        else:
            texts = target.read([piece.tokens for piece in batch])
        shard = Shard.of(texts)
        shard.write(path)
        line = {"shard": number, "positions": len(shard.tokens_T), "generated": batch is None}
        with (work / "shards.jsonl").open("a") as log:
            log.write(json.dumps(line | {"seconds": round(time.monotonic() - since, 1)}) + "\n")


def natural_length(tokens: Tokens) -> int:
    """Returns how many tokens stand before the second turn of the loop that a text ends in; all of
    them if it ends in no loop.

    A loop repeats a period of at most 32 tokens over at least 64 tokens, up to the end.
    """
    length = len(tokens)
    for period in range(1, min(MAX_LOOP_PERIOD, length - 1) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        repeated = length - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if repeated + period >= MIN_LOOP_TOKENS:
            return length - repeated
    return length


def without_loop(text: ReadText) -> ReadText:
    """Returns the text up to its loop."""
    length = natural_length(text.tokens)
    return ReadText(tokens=text.tokens[:length], rows=text.rows[: length - 1])


def _generated(
    target: TargetModel, pieces: Sequence[TextPiece], recipe: Recipe, seed: int
) -> list[ReadText]:
    rng, texts = np.random.default_rng(seed), list[ReadText]()
    labels = sorted({piece.label for piece in pieces})
    by_label = {label: [p for p in pieces if p.label == label] for label in labels}
    for _ in range(recipe.batches):
        prompts, temperatures = list[Tokens](), list[float]()
        for index in range(recipe.batch):
            group = by_label[labels[index % len(labels)]]
            prompts.append(_prompt(group[int(rng.integers(len(group)))].tokens, rng))
            temperatures.append(float(rng.choice(recipe.temperatures)))
        done = target.generate(prompts, recipe.count, temperatures, int(rng.integers(2**31)))
        texts += [without_loop(text) for text in done]
    return [text for text in texts if len(text.rows)]


def _prompt(tokens: Tokens, rng: np.random.Generator) -> Tokens:
    least, most = _PROMPT_TOKENS
    length = int(rng.integers(min(least, len(tokens)), min(most, len(tokens)) + 1))
    start = int(rng.integers(len(tokens) - length + 1)) if rng.random() < 0.5 else 0
    return tokens[start : start + length]


def _batches(pieces: Sequence[TextPiece], size: int) -> Iterator[list[TextPiece]]:
    """Yields pieces of about `size` tokens in all, until there are no more."""
    batch, count = list[TextPiece](), 0
    for piece in pieces:
        batch.append(piece)
        count += len(piece.tokens)
        if count >= size:
            yield batch
            batch, count = [], 0
