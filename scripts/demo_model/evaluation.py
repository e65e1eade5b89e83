"""Measures bits per byte and the chosen experts in one pass over a domain's valid text.

B windows, S tokens in a window, T = B * S, D width, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from .network import Network
from .training import encode_documents
from .vocabulary import END_OF_TEXT_ID


@dataclass(frozen=True, slots=True)
class DomainResult:
    """The results on a domain's valid split. `choices` are counts."""

    num_bytes: int
    num_tokens: int
    bits_per_byte: float
    choices: Tensor  # [L, E] int64, on the CPU


@torch.no_grad()
def evaluate(
    network: Network, tokenizer: Tokenizer, documents: list[str], windows_at_once: int = 4
) -> DomainResult:
    """Predicts every token of the stream once, in consecutive windows of the full context.

    The stream starts with <|endoftext|> and keeps the one behind each document (its cost is
    charged to the document's bytes). A window's first token has one token of context, so the
    figure is a little too high rather than too low.
    """
    shape = network.shape
    stream = encode_documents(tokenizer, documents).astype(np.int64)
    targets = torch.from_numpy(stream)
    inputs = torch.cat((torch.tensor([END_OF_TEXT_ID]), targets[:-1]))
    choices_LE = torch.zeros(shape.num_layers, shape.num_experts, dtype=torch.int64)
    nats = 0.0
    for start, stop in window_spans(len(targets), shape.max_positions, windows_at_once):
        width = min(shape.max_positions, stop - start)
        rows_TD, _, expert_ids = network.hidden(inputs[start:stop].view(-1, width))
        nats += _total_nats(rows_TD, network.embedding, targets[start:stop])
        for layer, ids_TK in enumerate(expert_ids):
            choices_LE[layer] += ids_TK.flatten().bincount(minlength=shape.num_experts)
    num_bytes = sum(len(text.encode()) for text in documents)
    return DomainResult(num_bytes, len(targets), nats / math.log(2) / num_bytes, choices_LE)


def window_spans(num_tokens: int, window: int, at_once: int) -> list[tuple[int, int]]:
    """Yields spans of whole windows, and a last span that is shorter than a window.

    10 tokens, window 3, 2 at once: [(0, 6), (6, 9), (9, 10)].
    """
    full = num_tokens // window * window
    spans = [(s, min(s + window * at_once, full)) for s in range(0, full, window * at_once)]
    return spans + ([(full, num_tokens)] if full < num_tokens else [])


def _total_nats(rows_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> float:
    total = 0.0
    head = head_VD.bfloat16().t()
    for start in range(0, len(targets_T), 1024):
        logits = (rows_TD[start : start + 1024] @ head).float()
        targets = targets_T[start : start + 1024]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return total
