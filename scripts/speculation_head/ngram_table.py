"""A table of n-grams of the training text: the floor that a head must beat.

It guesses the token that most often followed the last three, or else the last two, or the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ORDERS = (4, 3, 2)


class NgramTable:
    """Contexts and their most frequent followers, by order.

    4-grams are left out for vocabularies above 55 000 tokens, as they do not fit into 63 bits.
    """

    def __init__(self, texts: Sequence[Ints], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._orders = [order for order in ORDERS if vocab_size**order < 2**63]
        stream = np.concatenate(texts)
        text = np.repeat(np.arange(len(texts)), [len(t) for t in texts])
        self._tables = [self._count(stream, text, order) for order in self._orders]

    def _count(self, stream: Ints, text: Ints, order: int) -> tuple[Ints, Ints]:
        """Returns contexts, sorted, and the token that most often follows each."""
        length = len(stream) - order + 1
        grams = np.zeros(length, dtype=np.int64)
        for offset in range(order):
            grams = grams * self._vocab_size + stream[offset : offset + length]
        grams = grams[text[:length] == text[order - 1 :]]
        found, counts = np.unique(grams, return_counts=True)
        contexts = found // self._vocab_size
        ranked = np.lexsort((counts, contexts))
        is_last = np.append(np.diff(contexts[ranked]) != 0, True)
        best = ranked[is_last]
        return contexts[best], found[best] % self._vocab_size

    def __call__(self, last_N3: Ints) -> Ints:
        """Guesses the tokens behind the last three (the newest last); -1 where nothing is known."""
        guess = np.full(len(last_N3), -1, dtype=np.int64)
        for order, (contexts, followers) in zip(self._orders, self._tables, strict=True):
            asked = np.zeros(len(last_N3), dtype=np.int64)
            for column in range(4 - order, 3):
                asked = asked * self._vocab_size + last_N3[:, column]
            place = np.minimum(np.searchsorted(contexts, asked), len(contexts) - 1)
            is_found = (contexts[place] == asked) & (guess < 0)
            guess[is_found] = followers[place[is_found]]
        return guess

    def chains(self, last_N3: Ints, most: int) -> Ints:
        """Guess chains of tokens [N, most]."""
        chain = last_N3
        for _ in range(most):
            chain = np.concatenate((chain, self(chain[:, -3:])[:, None]), axis=1)
        return chain[:, 3:]
