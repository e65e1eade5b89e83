"""The tokens of a model as grammars see them: their bytes, and which of them end an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import llguidance

from moe_serve.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
_MAX_KNOWN, _MAX_KNOWN_BYTES = 4096, 256


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` are the bytes of every id that has a logit; ids that spell nothing are empty and
    never allowed. `encode` is the model's tokenizer, if any."""

    tokens: tuple[bytes, ...]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Encode | None = field(default=None, compare=False)

    @cached_property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The library's tokenizer, made once: 10 ms for 4 000 tokens, most of a second for 150
        000."""
        wrapper = llguidance.TokenizerWrapper(_Wrapped(self))
        return llguidance.LLTokenizer(wrapper, eos_token=list(self.eos_ids))


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """Builds the vocabulary. Tokens that end an answer count as special, so they never stand for
    their own text."""
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(i) for i in range(vocab_size)),
        special_ids=frozenset(i for i in tokenizer.special_token_ids if i < vocab_size) | eos_ids,
        eos_ids=tuple(sorted(eos_ids)),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def read_vocabulary(folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> Vocabulary:
    """Builds the vocabulary from a checkpoint's folder."""
    return vocabulary_of(Tokenizer.load(folder), vocab_size, eos_ids)


class _Wrapped:
    """The tokenizer interface of the library. Where a grammar leaves only one text, the library
    takes the tokens of `__call__`, which must therefore spell exactly that text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens, self._encode = vocabulary.tokens, vocabulary.encode
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = vocabulary.eos_ids[0]
        ordinary = set(range(len(self.tokens))) - vocabulary.special_ids
        self._ids = {token: i for i in sorted(ordinary, reverse=True) if (token := self.tokens[i])}
        self._longest = max(map(len, self._ids), default=1)
        self._known: dict[bytes, list[int]] = {}  # texts that were encoded lately

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns the tokens of a text. Grammars ask for the same ones again and again: the keys of
        a schema, from each of their tokens on."""
        raw = text.encode() if isinstance(text, str) else bytes(text)
        known = self._known.get(raw)
        if known is None:
            known = self._tokens_of(raw)
            if len(raw) <= _MAX_KNOWN_BYTES:
                if len(self._known) >= _MAX_KNOWN:
                    self._known.clear()
                self._known[raw] = known
        return list(known)

    def _tokens_of(self, raw: bytes) -> list[int]:
        try:
            ids = [] if self._encode is None else self._encode(raw.decode())
        except UnicodeDecodeError:
            ids = []
        known = all(i < len(self._tokens) for i in ids)
        if ids and known and b"".join(self._tokens[i] for i in ids) == raw:
            return ids
        return self._longest_matches(raw)

    def _longest_matches(self, raw: bytes) -> list[int]:
        """Encodes greedily, for tokenizers that add a space or cannot encode the text. Stops at
        bytes without a token."""
        ids, start = [], 0
        while start < len(raw):
            ends = range(min(len(raw), start + self._longest), start, -1)
            end = next((e for e in ends if raw[start:e] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[raw[start:end]])
            start = end
        return ids
