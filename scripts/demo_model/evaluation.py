"""Compares the model's bits per byte on valid text with those of a byte trigram, by domain, and
measures how the domains share the experts.

The model passes a domain if it needs few enough bits per byte. One pass also counts which experts
were chosen; there every domain has the same weight, whatever the length of its text. B windows, S
tokens in a window, T = B * S, D width, V vocabulary, N domains, L layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from .corpus import END_OF_TEXT_ID
from .network import Network
from .training import encode_documents

_BYTES = 256
_SEPARATOR = b"\0"  # between documents; in no text

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
# Trigrams of an independent implementation, each trained on its domain's own train split.
REFERENCE_TRIGRAM = {
    "stories": 2.84,
    "encyclopedia": 3.01,
    "instruct": 2.60,
    "math": 2.84,
    "code_python": 2.83,
    "code_c": 2.79,
    "french": 2.66,
    "german_law": 2.29,
}
MIN_GAIN = 0.25


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


def trigram_bits_per_byte(train: list[str], valid: list[str]) -> float:
    """Returns the bits per byte of a byte trigram with interpolated Witten-Bell smoothing.

    With n(ab) = times that context ab was seen and t(ab) = different bytes seen after it,
        P(c | ab) = (n(abc) + t(ab) P(c | b)) / (n(ab) + t(ab)),
    and so on down to the uniform 1/256.
    """
    seen, asked = _stream(train), _stream(valid)
    probability: Floats = np.full(len(asked) - 2, 1.0 / _BYTES)
    for order in (1, 2, 3):
        probability = _interpolate(seen, asked, order, probability)
    num_text_bytes = sum(len(text.encode()) for text in valid)
    return float(-np.log2(probability).sum() / num_text_bytes)


def _stream(texts: list[str]) -> Bytes:
    joined = _SEPARATOR * 2 + _SEPARATOR.join(text.encode() for text in texts) + _SEPARATOR
    return np.frombuffer(joined, dtype=np.uint8)


def _interpolate(seen: Bytes, asked: Bytes, order: int, lower: Floats) -> Floats:
    """Returns P of each byte of `asked` from position 2 on, given `order` - 1 bytes; `lower` is
    interpolated."""
    counts = np.bincount(_keys(seen, order), minlength=_BYTES**order).astype(np.int32)
    by_context = counts.reshape(-1, _BYTES)
    num_seen = by_context.sum(axis=1)
    num_kinds = (by_context > 0).sum(axis=1)
    keys = _keys(asked, order)
    context = keys // _BYTES
    total = num_seen[context] + num_kinds[context]
    mixed = (counts[keys] + num_kinds[context] * lower) / np.maximum(total, 1)
    return np.where(total > 0, mixed, lower)


def _keys(stream: Bytes, order: int) -> NDArray[np.int64]:
    """Returns the n-gram that ends at each position from 2 on, as one number."""
    keys = np.zeros(len(stream) - 2, dtype=np.int64)
    for back in range(order - 1, -1, -1):
        keys = keys * _BYTES + stream[2 - back : len(stream) - back]
    return keys


@dataclass(frozen=True, slots=True)
class DomainScore:
    """The bits per byte on the whole valid split of one domain."""

    domain: str
    model: float
    trigram: float  # measured here
    num_bytes: int
    num_tokens: int

    @property
    def gain(self) -> float:
        """Returns how far the model is below the better of the two trigrams, as a fraction."""
        return 1 - self.model / min(self.trigram, REFERENCE_TRIGRAM[self.domain])

    @property
    def is_good(self) -> bool:
        return self.gain >= MIN_GAIN


NEARLY_DEAD = 0.1  # of the even share 1 / E


@dataclass(frozen=True, slots=True)
class LayerUse:
    """The use of experts in one layer, as shares of a domain's choices; 1 / E is even."""

    information_bits: float  # between domain and expert; 0 if all domains use experts alike
    top_share: float  # of a domain's choices, on its own `top` most used experts; mean over domains
    distance: (
        float  # total variation between two domains' use, mean over pairs; 0 alike, 1 disjoint
    )
    least_used: float  # the least used expert's share, as a multiple of the even share
    most_used: float
    num_nearly_dead: int
    num_dead: int


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """The use of experts in all domains, from counts of router choices."""

    domains: tuple[str, ...]
    share: Tensor  # [N, L, E] fp64; sums to 1 over E
    top: int

    @classmethod
    def of(cls, choices: dict[str, Tensor], top: int) -> ExpertUse:
        """Builds the use from each domain's counts [L, E]."""
        stacked = torch.stack(list(choices.values())).double()
        return cls(tuple(choices), stacked / stacked.sum(-1, keepdim=True), top)

    def layers(self) -> list[LayerUse]:
        return [self._layer(self.share[:, i]) for i in range(self.share.shape[1])]

    def _layer(self, share_NE: Tensor) -> LayerUse:
        pooled_E = share_NE.mean(0)
        relative_E = pooled_E * pooled_E.numel()
        information = _entropy(pooled_E) - _entropy(share_NE).mean()
        pairs = torch.combinations(torch.arange(len(share_NE)))
        distances = (share_NE[pairs[:, 0]] - share_NE[pairs[:, 1]]).abs().sum(-1) / 2
        return LayerUse(
            information_bits=float(information),
            top_share=float(share_NE.topk(self.top, dim=-1).values.sum(-1).mean()),
            distance=float(distances.mean()),
            least_used=float(relative_E.min()),
            most_used=float(relative_E.max()),
            num_nearly_dead=int((relative_E < NEARLY_DEAD).sum()),
            num_dead=int((pooled_E == 0).sum()),
        )

    def closest_and_farthest(self) -> tuple[tuple[str, str, float], tuple[str, str, float]]:
        """Returns the pairs of domains with the smallest and the largest distance, mean over
        layers."""
        pairs = []
        for i, first in enumerate(self.domains):
            for j in range(i + 1, len(self.domains)):
                gap_LE = (self.share[i] - self.share[j]).abs()
                pairs.append((first, self.domains[j], float(gap_LE.sum(-1).mean()) / 2))
        pairs.sort(key=lambda pair: pair[2])
        return pairs[0], pairs[-1]


def _entropy(share_E: Tensor) -> Tensor:
    """Returns the entropy in bits, over the last dimension."""
    nats: Tensor = -torch.special.xlogy(share_E, share_E).sum(-1)
    return nats / math.log(2)
