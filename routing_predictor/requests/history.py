"""Keeps the past choices of each request as a signature, the simplest predictor of its coming
choices.

A new request is assumed to choose like all others; its own choices count more with every token, and
older ones less. N tokens, L layers, K choices, E experts, S slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

_MEMORY = 128.0  # tokens after which a choice counts 1/e
_PRIOR_TOKENS = 8.0  # tokens that the prior counts for
_FIRST_CAPACITY = 64


class ChoiceHistory:
    """The histories by key (any integers). `num_experts` is the model's E."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = np.zeros((0, 0, num_experts), dtype=np.float32)  # [S, L, E]
        self._tokens = np.zeros(0, dtype=np.float32)  # [S]
        self._all = np.zeros((0, num_experts))  # [L, E]: of all requests
        self._all_tokens = 0.0

    def __contains__(self, key: int) -> bool:
        return key in self._slots

    def observe(self, keys: Items[int], parts: Items[NDArray[np.integer]]) -> None:
        """Adds choices [N, L, K] of each of these requests, in the order of their tokens."""
        if not keys:
            return
        self._reserve(keys, parts[0].shape[1])
        num_layers = len(self._all)
        lengths = np.array([len(part) for part in parts])
        ids_NLK = np.concatenate(parts).astype(np.int64)
        slots = np.array([self._slots[key] for key in keys])
        kept = np.exp(-lengths / _MEMORY).astype(np.float32)
        for slot, part in zip(slots, kept, strict=True):  # in place, because the counts are large
            self._counts[slot] *= part
        places_NLK = ids_NLK + np.arange(num_layers)[:, None] * self._num_experts
        flat_NLK = places_NLK + np.repeat(slots, lengths)[:, None, None] * self._all.size
        # Flat, because that is many times faster; both arrays are contiguous, so these are views.
        np.add.at(self._counts.reshape(-1), flat_NLK.ravel(), np.float32(1))
        np.add.at(self._all.reshape(-1), places_NLK.ravel(), 1.0)
        self._tokens[slots] = self._tokens[slots] * kept + lengths
        self._all_tokens += float(lengths.sum())

    def signatures(
        self, keys: Items[int], prior_RLE: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32] | None:
        """[R, L, E]; None while nothing is known at all. `prior_RLE` is from a predictor; by
        default the choices of all requests are the prior."""
        if prior_RLE is None:
            if not self._all_tokens:
                return None
            usual = (self._all / self._all_tokens).astype(np.float32)
            prior_RLE = np.broadcast_to(usual, (len(keys), *usual.shape))
        made = prior_RLE.astype(np.float32)
        for row, key in enumerate(keys):
            slot = self._slots.get(key)
            if slot is not None:
                own, count = self._counts[slot], float(self._tokens[slot])
                made[row] = (own + _PRIOR_TOKENS * made[row]) / (count + _PRIOR_TOKENS)
        return made

    def forget(self, keys: Iterable[int]) -> None:
        """Forgets these requests; unknown ones are ignored."""
        for key in keys:
            slot = self._slots.pop(key, None)
            if slot is not None:
                self._counts[slot], self._tokens[slot] = 0, 0
                self._free.append(slot)

    def _reserve(self, keys: Items[int], num_layers: int) -> None:
        if not len(self._all):
            self._all = np.zeros((num_layers, self._num_experts))
            self._counts = np.zeros((0, num_layers, self._num_experts), dtype=np.float32)
        new = [key for key in dict.fromkeys(keys) if key not in self._slots]
        while len(self._free) < len(new):
            size = max(_FIRST_CAPACITY, 2 * len(self._tokens))
            more = size - len(self._tokens)
            self._free += range(len(self._tokens), size)
            self._counts = np.pad(self._counts, ((0, more), (0, 0), (0, 0)))
            self._tokens = np.pad(self._tokens, (0, more))
        for key in new:
            self._slots[key] = self._free.pop()
