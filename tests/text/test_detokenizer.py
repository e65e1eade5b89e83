"""Incremental text equals the text of all ids, however tokens split characters."""

from __future__ import annotations

import functools
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from moe_serve.text.detokenizer import make_detokenizer
from moe_serve.text.token_bytes import ByteSpelling
from moe_serve.text.tokenizer import Tokenizer

SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("â", "Ĥ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens(["ein Wort", "日本"])
    return Tokenizer(backend)


def byte_fallback() -> Tokenizer:
    """Makes a tokenizer like Mixtral's: "▁" is a space, and unknown characters are byte tokens."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "a", "b", "é", "▁Hi", "\n"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([SPECIAL])
    return Tokenizer(backend)


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    skips = data.draw(st.booleans())
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skips)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skips), f"{ids=}"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_text_goes_on_behind_its_last_token(data: st.DataObject) -> None:
    """The decoder drops only the first space of a text. Bytes join those in front of them only if
    both make one character."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = st.integers(0, tokenizer.vocab_size - 2)  # but for the special token
    last = data.draw(ids.filter(lambda i: tokenizer.token_bytes(i).isascii()))
    answer = data.draw(st.lists(ids, max_size=12))
    detokenizer = make_detokenizer(tokenizer, follows=last)
    text = "".join(detokenizer.push(token) for token in answer) + detokenizer.flush()
    before = tokenizer.decode([last])
    assert text == tokenizer.decode([last, *answer])[len(before) :], f"{last=} {answer=}"


def test_where_a_text_begins_its_first_space_goes() -> None:
    tokenizer = TOKENIZERS["byte-fallback"]
    tokens = ("▁the", "a", "<0x0A>", "<0xC3>", SPECIAL)
    vocab = tokenizer._backend.get_vocab()
    the, a, newline, part, special = (vocab[token] for token in tokens)
    for follows, text in ((a, " the"), (newline, " the"), (part, "the"), (special, "the")):
        assert make_detokenizer(tokenizer, follows=follows).push(the) == text
    assert make_detokenizer(tokenizer).push(the) == "the"
    assert make_detokenizer(TOKENIZERS["byte-level"], follows=0).push(0) == "!"


@functools.cache
def parts_of_characters() -> frozenset[int]:
    tokenizer = TOKENIZERS["byte-fallback"]
    parts = (i for i in range(tokenizer.vocab_size) if tokenizer.is_byte_token(i))
    return frozenset(i for i in parts if not tokenizer.token_bytes(i).isascii())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_first_space_that_is_kept(data: st.DataObject) -> None:
    """No other character changes. The text has whole characters, as a grammar gives them."""
    tokenizer = TOKENIZERS["byte-fallback"]
    some = st.integers(0, tokenizer.vocab_size - 1).filter(lambda i: i not in parts_of_characters())
    ids = data.draw(st.lists(some, max_size=12))
    detokenizer = make_detokenizer(tokenizer, keeps_first_space=True)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    shown = [token for token in ids if token not in tokenizer.special_token_ids]
    spelt = b"".join(tokenizer.token_bytes(token) for token in shown)
    space = " " if spelt.startswith(b" ") else ""
    assert text.removeprefix(space) == tokenizer.decode(ids), f"{ids=}"
    assert text.startswith(space)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30))
def test_no_piece_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    detokenizer = make_detokenizer(tokenizer)
    ids = [token for char in text for token in tokenizer.encode(char)]
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_comes_out_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    detokenizer = make_detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode("🎉!")]
    assert pieces == ["", "", "🎉", "!"]  # F0 9F is one token


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        detokenizer = make_detokenizer(tokenizer)
        assert detokenizer.push(tokenizer.vocab_size + 5) + detokenizer.flush() == ""
        assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_cost_of_a_token_does_not_grow(name: str) -> None:
    """20 000 byte tokens never become a character; quadratic work would take minutes."""
    tokenizer = TOKENIZERS[name]
    token = tokenizer.encode("\u00ff")[0] if name == "byte-level" else 1 + 0xFF
    detokenizer = make_detokenizer(tokenizer)
    start = time.monotonic()
    text = "".join(detokenizer.push(token) for _ in range(20_000)) + detokenizer.flush()
    assert len(text) == 20_000
    assert time.monotonic() - start < 10.0


def test_spellings_are_recognised() -> None:
    assert TOKENIZERS["byte-level"].spelling is ByteSpelling.BYTE_LEVEL
    assert TOKENIZERS["byte-fallback"].spelling is ByteSpelling.BYTE_FALLBACK
