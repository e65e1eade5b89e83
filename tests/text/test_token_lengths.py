"""`min_num_tokens` is never more than the number of tokens that `encode` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from moe_serve.text.tokenizer import Tokenizer

TEXTS = ["aaaa bbbb aaaa    é é 日本 aaaa\n\n" * 20, "the the the then then"]


def byte_level(**parts: Any) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def byte_fallback() -> Backend:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + i for i, token in enumerate(["a", "▁", "▁a", "aa", "▁▁", "é", "aaaa"])}
    merges = [("▁", "a"), ("a", "a"), ("▁", "▁"), ("aa", "aa")]
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return backend


BOUNDED: dict[str, Callable[[], Backend]] = {
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte fallback": byte_fallback,
}
TOKENIZERS = {name: Tokenizer(make()) for name, make in BOUNDED.items()}
PIECES = st.sampled_from(["a", "aaaa", " ", "    ", "é", "\u1fbe\u0308\u0301", "\u212a", "<|end|>"])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30) | st.lists(PIECES, max_size=40).map("".join))
def test_never_more_than_encoding_gives(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_long_texts_are_known_to_be_long(name: str) -> None:
    assert TOKENIZERS[name].min_num_tokens("a" * 100_000) > 1000


def _with_rstrip() -> Backend:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<|pad|>", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "make",
    [
        lambda: byte_level(normalizer=normalizers.Strip()),
        lambda: byte_level(normalizer=normalizers.Replace("aa", "")),
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
            )
        ),
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        _with_rstrip,
        lambda: Backend(models.BPE({"a": 0}, [])),
        lambda: Backend(models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_nothing_is_said_where_text_can_vanish(make: Callable[[], Backend]) -> None:
    assert Tokenizer(make()).min_num_tokens(" " * 100_000) == 0
