"""Measures how many drafted tokens the model accepts, on text that it generates itself.

A draft starts from the state behind token t and from token t + 1. Its first token is accepted if it
equals token t + 2, its second if token t + 3 is equal, too, and so on. The text is either greedy or
sampled; a loop at its end is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_serve.learn.documents import TextPiece

from .shards import natural_length
from .target import TargetModel, Tokens

MOST = 4  # drafted tokens
PROMPT_TOKENS = 64
_CONTEXT = 3

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The amount of text that the model generates."""

    texts_per_label: int = 48
    count: int = 160  # tokens of a text, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """N places in generated texts. -1 in `truth_NM`: behind the natural end of the text."""

    hidden_ND: Tensor
    last_N3: Tensor  # the tokens up to t + 1, the newest last
    truth_NM: Tensor
    label_N: Tensor  # index into `labels`
    is_looped_N: Tensor  # the text ends in a loop
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Shares of drafted tokens. `by_position`: of those whose predecessors were accepted."""

    num_places: int
    first: float
    by_position: tuple[float, ...]
    tokens_per_step: float  # with MOST drafted tokens in each


def ask(
    target: TargetModel,
    pieces: Sequence[TextPiece],
    *,
    temperature: float,
    sizes: Sizes,
    seed: int,
) -> Asked:
    """Lets the model continue the beginnings of texts."""
    labels = tuple(sorted({piece.label for piece in pieces}))
    parts: list[tuple[Tensor, Ints, Ints, int, bool]] = []
    for index, label in enumerate(labels):
        group = [p for p in pieces if p.label == label and len(p.tokens) >= PROMPT_TOKENS // 2]
        prompts = [piece.tokens[:PROMPT_TOKENS] for piece in group[: sizes.texts_per_label]]
        done = target.generate(prompts, sizes.count, [temperature] * len(prompts), seed + index)
        for prompt, text in zip(prompts, done, strict=True):
            tokens = text.tokens[: natural_length(text.tokens)]
            if len(tokens) < 3:
                continue
            last, truth = _places(prompt, tokens)
            is_looped = len(tokens) < len(text.tokens)
            parts.append((text.rows.hidden_TD[: len(last)], last, truth, index, is_looped))
    lengths = torch.tensor([len(part[1]) for part in parts])
    return Asked(
        hidden_ND=torch.cat([part[0] for part in parts]),
        last_N3=torch.from_numpy(np.concatenate([part[1] for part in parts])),
        truth_NM=torch.from_numpy(np.concatenate([part[2] for part in parts])),
        label_N=torch.tensor([part[3] for part in parts]).repeat_interleave(lengths),
        is_looped_N=torch.tensor([part[4] for part in parts]).repeat_interleave(lengths),
        labels=labels,
    )


def _places(prompt: Tokens, tokens: Tokens) -> tuple[Ints, Ints]:
    """Returns the last three tokens and the following ones for every place of a text, whose first
    token is the prompt's last."""
    num_places = len(tokens) - 2
    whole = np.concatenate((prompt[-_CONTEXT:-1], tokens))
    last = np.stack([whole[i + 1 : i + 1 + num_places] for i in range(_CONTEXT)], axis=1)
    padded = np.concatenate((tokens[2:], np.full(MOST - 1, -1)))
    truth = np.stack([padded[i : i + num_places] for i in range(MOST)], axis=1)
    return last, truth


def accepted(drafts_NM: Ints, asked: Asked, chosen_N: NDArray[np.bool_] | None = None) -> Accepted:
    """Returns the acceptance of drafts at the chosen places."""
    truth_NM = asked.truth_NM.numpy()
    if chosen_N is not None:
        drafts_NM, truth_NM = drafts_NM[chosen_N], truth_NM[chosen_N]
    is_equal = np.cumprod(drafts_NM == truth_NM, axis=1).astype(bool)
    reached = np.ones(len(truth_NM), dtype=bool)
    shares, survival = list[float](), 1.0
    expected = 1.0
    for position in range(MOST):
        able = reached & (truth_NM[:, position] >= 0)
        shares.append(float(is_equal[able, position].mean()) if able.any() else 0.0)
        survival *= shares[-1]
        expected += survival
        reached = is_equal[:, position]
    return Accepted(
        num_places=len(truth_NM),
        first=shares[0],
        by_position=tuple(shares),
        tokens_per_step=expected,
    )


def by_label(drafts_NM: Ints, asked: Asked) -> dict[str, Accepted]:
    """Returns the acceptance of each label, and of all places as "all"."""
    result = {"all": accepted(drafts_NM, asked)}
    for index, label in enumerate(asked.labels):
        result[label] = accepted(drafts_NM, asked, (asked.label_N == index).numpy())
    return result
