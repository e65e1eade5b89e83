"""Compares a head with a table of n-grams on text that the model generates, by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_serve.cache.page_key import model_identity
from moe_serve.learn.documents import TextPiece
from moe_serve.model.speculation_head import SpeculationHead

from .acceptance import MOST, PROMPT_TOKENS, Asked, Ints, Sizes, accepted, ask, by_label
from .ngram_table import NgramTable
from .target import TargetModel

TEMPERATURES = {"greedy": 0.0, "sampled at 0.7": 0.7, "sampled at 1.0": 1.0}
_ROWS_AT_ONCE = 512
_SEED = 5


def judge(
    target: TargetModel,
    folder: Path,
    table: NgramTable,
    pieces: Sequence[TextPiece],
    sizes: Sizes,
) -> dict[str, Any]:
    """Returns the shares of accepted tokens by kind of text, drafter and label."""
    head = target.speculation_head(folder)
    figures: dict[str, Any] = {
        "model": target.folder.resolve().name,
        "model_identity": model_identity(target.folder).hex(),
        "prompt_tokens": PROMPT_TOKENS,
        "texts_per_label": sizes.texts_per_label,
        "tokens_per_text": sizes.count,
        "drafted_tokens": MOST,
    }
    for number, (kind, temperature) in enumerate(TEMPERATURES.items()):
        asked = ask(target, pieces, temperature=temperature, sizes=sizes, seed=_SEED + 100 * number)
        own, tables = head_drafts(head, asked), table.chains(asked.last_N3.numpy(), MOST)
        whole = ~asked.is_looped_N.numpy()
        figures[kind] = {
            "head": {label: asdict(each) for label, each in by_label(own, asked).items()},
            "table": {label: asdict(each) for label, each in by_label(tables, asked).items()},
            "head, texts without any loop": asdict(accepted(own, asked, whole)),
            "table, texts without any loop": asdict(accepted(tables, asked, whole)),
        }
    return figures


def head_drafts(head: SpeculationHead, asked: Asked) -> Ints:
    """Drafts at every place -> [N, MOST]."""
    drafts = list[list[int]]()
    newest_N = asked.last_N3[:, -1].contiguous()
    for start in range(0, len(newest_N), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        guesses = head.draft(asked.hidden_ND[part], newest_N[part], MOST)
        drafts += [[*guess.token_ids] for guess in guesses]
    return np.asarray(torch.tensor(drafts))
