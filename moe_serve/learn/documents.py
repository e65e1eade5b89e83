"""Reads documents for predictors from text files, and cuts them into pieces for the model.

A file holds documents separated by lines `<|endoftext|>`; `.xz` files are unpacked. From a folder
with files named train* and valid*, training takes the first and evaluation the second.
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import ConfigError
from moe_serve.regular_file import regular_file
from moe_serve.text.tokenizer import Tokenizer
from routing_predictor.requests.texts import PIECE

_SEPARATOR = "<|endoftext|>"
_SUFFIXES = (".txt", ".txt.xz")
_PIECE_TOKENS = 1024  # pieces of a long document are separate requests
_MIN_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `label` is its folder or its file."""

    text: str
    label: str

    @property
    def name(self) -> str:
        """A name derived from the content, so that equal texts have equal names."""
        return sha256(self.text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Tokens that a model reads from their start."""

    tokens: NDArray[np.int64]
    request_id: str  # pieces of one document share what stands before PIECE
    label: str


def read_documents(paths: Sequence[Path], split: str) -> list[Document]:
    """Reads the documents of a split, "train" or "valid". Raises ConfigError if there are none."""
    documents = []
    for path in paths:
        for file in _files_of(path, split):
            is_split = file.name.startswith(("train", "valid"))
            label = file.parent.name if is_split else file.name.split(".")[0]
            texts = (text.strip("\n") for text in f"\n{_read(file)}".split(f"\n{_SEPARATOR}"))
            documents += [Document(text, label) for text in texts if text.strip()]
    if not documents:
        raise ConfigError(f"there is no document in {', '.join(map(str, paths))}.")
    return documents


def cut_into_pieces(
    documents: Sequence[Document], tokenizer: Tokenizer, max_tokens: int, max_piece: int, seed: int
) -> list[TextPiece]:
    """Cuts documents into pieces of about `max_tokens` tokens in all, equally many for each label:
    first pieces of documents in random order, then second ones, and so on.
    """
    by_label: dict[str, list[Document]] = {}
    for document in documents:
        by_label.setdefault(document.label, []).append(document)
    rng, size = np.random.default_rng(seed), min(max_piece, _PIECE_TOKENS)
    pieces = []
    for label in sorted(by_label):
        group = by_label[label]
        shuffled = [group[index] for index in rng.permutation(len(group))]
        pieces += _pieces_of(shuffled, tokenizer, max_tokens // len(by_label), size)
    if not pieces:
        raise ConfigError(f"no document has {_MIN_TOKENS} tokens or more: give longer texts.")
    return [pieces[index] for index in rng.permutation(len(pieces))]


def hash_of(pieces: Sequence[TextPiece]) -> str:
    """Returns the hash of all names and tokens, in order."""
    digest = sha256()
    for piece in pieces:
        digest.update(piece.request_id.encode())
        digest.update(piece.tokens.tobytes())
    return digest.hexdigest()


def _pieces_of(
    documents: Sequence[Document], tokenizer: Tokenizer, max_tokens: int, size: int
) -> list[TextPiece]:
    encoded: list[NDArray[np.int64]] = []
    pieces, num_tokens, depth = list[TextPiece](), 0, 0
    while num_tokens < max_tokens:
        has_more = False
        for index, document in enumerate(documents):
            if depth == 0:
                encoded.append(np.array(tokenizer.encode(document.text), dtype=np.int64))
            tokens = encoded[index][depth * size : (depth + 1) * size]
            if len(tokens) < _MIN_TOKENS:
                continue
            has_more = True
            pieces.append(TextPiece(tokens, f"{document.name}{PIECE}{depth}", document.label))
            num_tokens += len(tokens)
            if num_tokens >= max_tokens:
                break
        if not has_more:
            break
        depth += 1
    return pieces


def _files_of(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist: give text files, or folders of them.")
    files = sorted(file for file in path.rglob("*") if file.name.endswith(_SUFFIXES))
    return [file for file in files if file.name.startswith(split)] or files


def _read(path: Path) -> str:
    try:
        regular_file(path)
        if path.suffix == ".xz":
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        return path.read_text(encoding="utf-8")
    except (OSError, lzma.LZMAError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.") from None
