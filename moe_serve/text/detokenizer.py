"""Converts token ids to text, one token at a time, at a cost that does not grow with the text.

Invariant of every detokenizer: the concatenation of the results of `push` and `flush` equals
decoding all ids at once, or, after a token that they follow, the text that these ids add. A
character whose bytes are spread over tokens is returned when it is complete.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from moe_serve.text.token_bytes import ByteSpelling
from moe_serve.text.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 8  # a valid character needs at most four bytes


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Returns the text that is certain after this token; may be empty."""
        ...

    def flush(self) -> str:
        """Returns the held text when no token follows."""
        ...


def make_detokenizer(
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
    kept_ids: frozenset[int] = frozenset(),
    follows: int | None = None,
    keeps_first_space: bool = False,
) -> Detokenizer:
    """Makes the detokenizer for the vocabulary's spelling; `kept_ids` are never skipped.

    `follows`: the last token of a text that continues. None: a text begins here, and a
    SentencePiece decoder removes its first space, unless `keeps_first_space`.
    """
    skipped = tokenizer.special_token_ids - kept_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.spelling is ByteSpelling.BYTE_LEVEL:
        return ByteLevelDetokenizer(tokenizer, skipped)
    context = _context_of(follows, tokenizer)
    return WindowDetokenizer(tokenizer, skipped, context, keeps_first_space=keeps_first_space)


def _context_of(follows: int | None, tokenizer: Tokenizer) -> list[int]:
    """Returns the context after `follows`: empty after a special token or a part of a character,
    which has no text of its own.
    """
    if follows is None or follows in tokenizer.special_token_ids:
        return []
    is_part = tokenizer.is_byte_token(follows) and not tokenizer.token_bytes(follows).isascii()
    return [] if is_part else [follows]


class ByteLevelDetokenizer:
    """Detokenizes byte-level BPE: tokens are bytes,
    and text is their incremental UTF-8 decoding.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes other vocabularies: decodes a short window and returns its new text.

        ... | context: ids already shown | pending: ids not yet shown |
              decode(context + pending) = decode(context) + new text

    The context preserves effects of the left neighbour (a leading space that the decoder strips). A
    run of byte-fallback tokens is one pending group until another token ends it, because the
    decoder treats such a run as a whole.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        context: list[int] | None = None,
        *,
        keeps_first_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = context or []
        self._pending: list[int] = []
        self._may_lack_space = keeps_first_space

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < _MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        after = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return after[len(before) :]

    def _take(self, text: str) -> str:
        """Returns the text of the pending tokens, which are now shown."""
        spelt = b""
        if self._may_lack_space:
            self._may_lack_space = False
            spelt = b"".join(map(self._tokenizer.token_bytes, self._pending))
        self._advance(text)
        return " " + text if spelt == b" " + text.encode() else text

    def _advance(self, text: str) -> None:
        self._context = self._pending if text else self._context + self._pending
        self._pending = []
