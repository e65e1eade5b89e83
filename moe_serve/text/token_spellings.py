"""Finds the tokens that a tokenizer writes a text with, which depend on the surrounding text."""

from __future__ import annotations

import functools

from moe_serve.text.tokenizer import Tokenizer

_BEFORE = ("", " ", "\n", ".")
_AFTER = ("", " ", "\n", "\n\n")


@functools.lru_cache(maxsize=64)
def spellings(text: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the text's own spelling first, then others: between line breaks, after a full stop.

    At an edge a token may include a neighbour too (`>\\n`). Empty if the vocabulary cannot write
    the text. A marker that is a token of its own has one spelling.
    """
    wanted = text.encode()
    found: dict[tuple[int, ...], None] = {}
    for before in _BEFORE:
        for after in _AFTER:
            ids = tokenizer.encode(before + text + after, add_special_tokens=False)
            found[_around(wanted, ids, len(before), tokenizer)] = None
    return tuple(ids for ids in found if ids)


@functools.lru_cache(maxsize=8)
def blank_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of spaces and line breaks that answers begin with."""
    ids = {i for t in ("\n", "\n\n", " ") for i in tokenizer.encode(t, add_special_tokens=False)}
    return tuple(sorted(i for i in ids if tokenizer.token_bytes(i).isspace()))


def _around(
    wanted: bytes, ids: list[int], num_before: int, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the tokens that contain a part of `wanted`; empty if they do not spell it."""
    pieces = [tokenizer.token_bytes(i) for i in ids]
    start = b"".join(pieces).find(wanted, num_before)
    if start < 0:
        return ()
    held, place = [], 0
    for token, piece in zip(ids, pieces, strict=True):
        if place < start + len(wanted) and place + len(piece) > start:
            held.append(token)
        place += len(piece)
    return tuple(held)
