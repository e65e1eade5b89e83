"""The prompts of a workload: random words or token ids, with pieces that requests share.

The same seed gives the same prompts on every machine. Another seed shares nothing with it, so that
a second run does not find the first one's prompts in the server's prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from moe_serve.bench.workload.request import Prompt, Slot

DataKind = Literal["words", "tokens"]

_FIRST_TOKEN_ID = 16  # below it many vocabularies have ids that steer the model
_MAX_BLOCKS_KEPT = 4096
_UNIQUE, _SHARED = 1, 2  # which stream of random numbers
# Short and frequent: nearly every tokenizer has one token for each, with the space before it.
_TEXT = """
the of and to in is that was for on are with they be at one have this from by hot word but what some
we can out other were all there when up use your how said an each she which do their time if will
way about many then them write would like so these her long make thing see him two has look more day
could go come did number sound no most people my over know water than call first who may down side
been now find any new work part take get place made live where after back little only round man year
came show every good me give our under
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScale:
    """The tokens a server counts for words: `overhead + per_word * num_words`."""

    per_word: float = 1.0
    overhead: float = 0.0

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead) / self.per_word))

    @classmethod
    def through(cls, short: tuple[int, int], long: tuple[int, int]) -> TextScale:
        """Fits the line through two measurements (words, tokens); assumes one token per word if
        they are implausible."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return cls()
        return cls(per_word=per_word, overhead=max(0.0, short[1] - per_word * short[0]))


class PromptMaker:
    """Writes the prompt of a slot: its shared blocks, then its own text up to the slot's length."""

    def __init__(
        self,
        *,
        kind: DataKind,
        seed: int,
        vocab_size: int = 1000,
        scale: TextScale | None = None,
    ) -> None:
        self._kind: DataKind = kind
        self._seed = seed
        self._vocab_size = vocab_size
        self._scale = scale or TextScale()
        self._block = lru_cache(_MAX_BLOCKS_KEPT)(self._make_block)

    def prompt(self, slot: Slot) -> Prompt:
        if slot.prompt is not None:
            return slot.prompt
        pieces = [self._block(block.key, block.num_tokens) for block in slot.blocks]
        num_units = slot.prompt_tokens
        if self._kind == "words":
            num_units = self._scale.num_words(num_units)
        num_rest = num_units - sum(len(piece) for piece in pieces)
        rng = np.random.default_rng([self._seed, _UNIQUE, slot.index])
        if num_rest > 0:
            pieces.append(self._draw(rng, num_rest))
        units_N = np.concatenate(pieces)[: max(1, num_units)]
        if self._kind == "tokens":
            return [int(unit) for unit in units_N]
        return " ".join([WORDS[unit] for unit in units_N])

    def _make_block(self, key: str, num_tokens: int) -> np.ndarray:
        """Returns the same units for the same key, for any number of them."""
        rng = np.random.default_rng([self._seed, _SHARED, *key.encode()])
        num_units = num_tokens
        if self._kind == "words":
            num_units = max(1, round(num_tokens / self._scale.per_word))
        return self._draw(rng, num_units)

    def _draw(self, rng: np.random.Generator, num_units: int) -> np.ndarray:
        if self._kind == "words":
            return rng.integers(0, len(WORDS), num_units)
        return rng.integers(_FIRST_TOKEN_ID, self._vocab_size, num_units)


def probe_prompts(seed: int) -> Iterator[tuple[int, str]]:
    """Returns (words, text) of two lengths, to measure the server's tokens per word."""
    for num_words in (16, 272):
        rng = np.random.default_rng([seed, _UNIQUE, 2**31 + num_words])
        yield num_words, " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), num_words))
