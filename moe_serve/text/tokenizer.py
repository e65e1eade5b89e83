"""The tokenizer of a checkpoint folder, using the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from moe_serve.errors import CheckpointError, TokenizerError
from moe_serve.json_text import parse_json
from moe_serve.regular_file import is_there, regular_file
from moe_serve.text.token_bytes import (
    ByteSpelling,
    byte_alphabet,
    bytes_of,
    is_byte_token,
    spelling_of,
)

# One byte of a text's NFC form stands for at most 3.5 bytes of the text: U+1FBE U+0308 U+0301 (7
# bytes) becomes U+0390 (2 bytes).
_NFC_SHRINKS_BY = 4
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace"})
_BEFORE = ("", " ", "\n", ".")
_AFTER = ("", " ", "\n", "\n\n")


def max_bytes_per_token(content: Mapping[str, Any]) -> int | None:
    """Returns a bound of the text that one token can stand for, or None if it is not bounded.

    It serves to refuse a text that is too long before tokenizing it. A bound exists if the
    tokenizer drops nothing and has no token of unbounded length. That holds for byte-level BPE and
    for BPE with byte fallback, unless one of their steps shortens the text.
    """
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
    else:  # characters outside the vocabulary are dropped, or become one unknown token
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
    """Yields the steps of a normalizer or pre-tokenizer, with sequences of them flattened."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in part[key]:
            yield from _steps(inner, key)
    else:
        yield part


_log = logging.getLogger(__name__)
T = TypeVar("T")

# The maximum bytes of text per token, in longest tokens, if a tokenizer sets no bound: it may drop
# spaces, or write unknown characters as one token.
_UNBOUNDED_FACTOR = 4
# The library releases the interpreter for batches only, also for a batch of one; work shorter than
# the interpreter's hand-over may keep it.
_MAX_HELD_CHARS = 4096
_MAX_HELD_IDS = 2048
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """Converts text to token ids and back. Several threads may use it.

    `special_tokens` maps names such as "eos_token" to their text, for chat templates.
    `eos_token_ids` end a generation: generation_config.json's, else config.json's, else the
    tokenizer's own eos token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        # Encode each text in the calling thread: the library would start a thread for each core.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        os.environ["RUST_BACKTRACE"] = "0"  # report a panic in one line instead of forty
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._token_bytes: dict[int, bytes] = {}
        self.special_tokens = dict(special_tokens or {})
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self.special_token_ids = frozenset(self.special_ids.values())
        content = json.loads(backend.to_str())
        self.spelling = spelling_of(content["decoder"])
        self._max_bytes_per_token = max_bytes_per_token(content)
        longest = max(
            map(len, map(str.encode, backend.get_vocab(with_added_tokens=True))), default=1
        )
        self.usual_bytes_per_token = self._max_bytes_per_token or _UNBOUNDED_FACTOR * longest

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, and the special tokens in the folder's other files."""
        path = folder / "tokenizer.json"
        if not is_there(path):
            raise CheckpointError(f"{path} does not exist: a tokenizers-format file is needed.")
        try:
            regular_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise CheckpointError(f"{path} is not a readable tokenizer: {error}.") from error
        special_tokens = _special_tokens(folder)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns token ids; text rendered by a chat template needs `add_special_tokens=False`.

        Other threads run while a long text is encoded. Raises TokenizerError if the library fails.
        """
        return _guarded(
            lambda: self._encode(text, add_special_tokens), f"a text of {len(text)} characters"
        )

    def _encode(self, text: str, has_special: bool) -> list[int]:
        if len(text) <= _MAX_HELD_CHARS:
            return self._backend.encode(text, add_special_tokens=has_special).ids
        batch = self._backend.encode_batch_fast([text], add_special_tokens=has_special)
        return batch[0].ids

    def min_num_tokens(self, text: str) -> int:
        """Returns a lower bound of `encode`'s number of tokens, without encoding; 0 if there is no
        bound.
        """
        if self._max_bytes_per_token is None:
            return 0
        return -(-len(text.encode()) // self._max_bytes_per_token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text; see `encode`."""
        ids = list(token_ids)
        return _guarded(lambda: self._decode(ids, skip_special_tokens), f"{len(ids)} token ids")

    def _decode(self, ids: list[int], skips_special: bool) -> str:
        if len(ids) <= _MAX_HELD_IDS:
            return self._backend.decode(ids, skip_special_tokens=skips_special)
        return self._backend.decode_batch([ids], skip_special_tokens=skips_special)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text;
        empty for an id outside the vocabulary.
        """
        cached = self._token_bytes.get(token_id)
        if cached is None:
            token = self._backend.id_to_token(token_id)
            cached = b"" if token is None else bytes_of(token, self.spelling)
            self._token_bytes[token_id] = cached
        return cached

    def token_text(self, token_id: int) -> str:
        r"""The token as the API shows it: its text, or `bytes:\xe2\x82` for a part of a character.

        Unlike decoding with replacement characters, this keeps different tokens different.
        """
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def is_byte_token(self, token_id: int) -> bool:
        """Returns whether the token is one byte of a character that other tokens complete (byte
        fallback).
        """
        if self.spelling is not ByteSpelling.BYTE_FALLBACK:
            return False
        token = self._backend.id_to_token(token_id)
        return token is not None and is_byte_token(token)


def _guarded(work: Callable[[], T], subject: str) -> T:
    """Returns the library's result.

    Its panics are not an `Exception`: no caller would catch them.
    """
    try:
        return work()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "it gave no reason"
        _log.error("the tokenizer panicked on %s: %s", subject, reason)
    raise TokenizerError(f"The tokenizer of this model fails on {subject}: {reason}.")


def read_json_file(path: Path) -> dict[str, Any]:
    """Returns the object in a checkpoint's JSON file; {} if there is no such file."""
    if not is_there(path):
        return {}
    try:
        content = parse_json(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return content


def _special_tokens(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = read_json_file(folder / name)
        for key in _SPECIAL_NAMES:
            token = content.get(key)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[key] = text
    return found


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        value = read_json_file(folder / name).get("eos_token_id")
        ids = [value] if isinstance(value, int) else value
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            path = folder / name
            raise CheckpointError(f"{path}: eos_token_id must be token ids, got {value!r}.")
        return tuple(ids)
    eos_token = special_tokens.get("eos_token")
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    return () if eos_id is None else (eos_id,)


@functools.lru_cache(maxsize=64)
def spellings(text: str, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the text's own spelling first, then others: between line breaks, after a full stop.

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
    """Returns the tokens of spaces and line breaks that answers begin with."""
    ids = {i for t in ("\n", "\n\n", " ") for i in tokenizer.encode(t, add_special_tokens=False)}
    return tuple(sorted(i for i in ids if tokenizer.token_bytes(i).isspace()))


def _around(
    wanted: bytes, ids: list[int], num_before: int, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Returns the tokens that contain a part of `wanted`; empty if they do not spell it."""
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
