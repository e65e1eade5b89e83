"""How much text one token can stand for: what makes a text too long before it is tokenized.

A bound exists where the tokenizer drops nothing and gives no token of unbounded length. That is so
for byte-level BPE and for BPE with byte fallback, unless a step of theirs shortens the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moe_serve.text.token_bytes import byte_alphabet

# The most bytes of a text that one byte of its NFC form can stand for is 3.5: U+1FBE U+0308 U+0301
# (7 bytes) becomes U+0390 (2 bytes).
_NFC_SHRINKS_BY = 4
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})


def max_bytes_per_token(content: Mapping[str, Any]) -> int | None:
    """The bound for this tokenizer.json, or None if there is none."""
    model = content["model"]
    added = content.get("added_tokens") or []
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    vocab = model["vocab"]
    pre_tokenizers = list(_steps(content.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_steps(content.get("normalizer"), "normalizers"))
    if any(_drops_text(step) for step in pre_tokenizers):
        return None
    shrinks_by = 1
    for step in normalizers:
        if step["type"] == "NFC":
            shrinks_by = _NFC_SHRINKS_BY
        elif not _keeps_length(step):
            return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*pre_tokenizers, *normalizers))
    if is_byte_level and all(char in vocab for char in byte_alphabet()):
        longest = max(map(len, vocab))  # one character is one byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest = max(len(token.encode()) for token in vocab)
    else:  # what is not in the vocabulary is dropped, or becomes one unknown token
        return None
    return shrinks_by * max(longest, *(len(token["content"].encode()) for token in added), 1)


def _drops_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] == "Removed")
    return pre_tokenizer["type"] not in _KEEPING


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return normalizer["type"] in ("Prepend", "ByteLevel")


def _steps(part: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with sequences of them laid out flat."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    else:
        yield part
