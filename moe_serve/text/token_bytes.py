"""Converts a token of the vocabulary to its exact bytes.

A vocabulary spells bytes in one of three ways, which the decoder in tokenizer.json states:

    ByteLevel     every byte is a printable character: " the" is "Ġthe"
    byte fallback "▁" is a space, "<0x0A>" is one byte, the rest is UTF-8 (SentencePiece)
    plain         the token is its own text
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteSpelling(enum.Enum):
    """The ways in which vocabularies write bytes."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte-fallback"
    PLAIN = "plain"


def spelling_of(decoder: Mapping[str, Any] | None) -> ByteSpelling:
    """Returns the spelling that the `decoder` entry of a tokenizer.json stands for."""
    parts = _flatten(decoder)
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return ByteSpelling.BYTE_LEVEL
    has_marker = any(
        part.get("type") == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts
    )
    if has_marker or "ByteFallback" in kinds or "Metaspace" in kinds:
        return ByteSpelling.BYTE_FALLBACK
    return ByteSpelling.PLAIN


def bytes_of(token: str, spelling: ByteSpelling) -> bytes:
    """Returns the bytes of one vocabulary entry, as the tokenizer's decoder would write them."""
    if spelling is ByteSpelling.BYTE_LEVEL:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token outside the byte alphabet stands for itself
            return token.encode()
    if spelling is ByteSpelling.BYTE_FALLBACK:
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()
    return token.encode()


def is_byte_token(token: str) -> bool:
    """Returns whether a byte-fallback vocabulary writes a single byte with this token."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]


def byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for 256, 257,
    ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = sorted({*range(256)} - {*printable})
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = byte_alphabet()
