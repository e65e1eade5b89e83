"""Reads the texts to calibrate on, and held-out ones to measure on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.errors import ConfigError
from moe_serve.learn.documents import Document, TextPiece, cut_into_pieces, read_documents
from moe_serve.text.tokenizer import Tokenizer

_HELD_OUT = 10  # every tenth document, or the last tenth of a text
_FEWEST_TOKENS = 1024  # for GPTQ
_MAX_PIECE = 1024


@dataclass(frozen=True, slots=True)
class QuantiseTexts:
    """Pieces of text, each read from its start. A piece's label is its domain."""

    calibration: Sequence[TextPiece]
    held_out: Sequence[TextPiece]


def read_texts(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    held_out_paths: Sequence[Path] = (),
    num_tokens: int,
    num_held_out: int,
    max_piece: int,
    seed: int,
    otherwise: str = "use --method rtn without them",
) -> QuantiseTexts:
    """Reads texts and holds some out: files named valid*, every tenth document, or the end of a
    text.

    With `held_out_paths` these are held out instead. A document that is held out is not calibrated
    on, wherever else it occurs.

    Nothing is read to calibrate on if `num_tokens` is 0. Raises ConfigError for too few tokens,
    with the advice `otherwise`.
    """
    size = min(max_piece, _MAX_PIECE)
    train = read_documents(paths, "train")
    if held_out_paths:
        valid = read_documents(held_out_paths, "valid")
    else:
        train, valid = _split(train, read_documents(paths, "valid"))
    names = {document.name for document in valid}
    train = [document for document in train if document.name not in names]
    held_out = cut_into_pieces(valid, tokenizer, num_held_out, size, seed)
    if not num_tokens:
        return QuantiseTexts((), held_out)
    calibration = cut_into_pieces(train, tokenizer, num_tokens, size, seed)
    found = sum(len(piece.tokens) for piece in calibration)
    if found < min(_FEWEST_TOKENS, num_tokens):
        raise ConfigError(
            f"--texts give {found} tokens to calibrate on, and at least {_FEWEST_TOKENS} are "
            f"needed: add texts, or {otherwise}."
        )
    return QuantiseTexts(calibration, held_out)


def _split(train: list[Document], valid: list[Document]) -> tuple[list[Document], list[Document]]:
    """Separates the two where they share documents: labels whose files are not named train and
    valid.
    """
    names = {document.name for document in train}
    shared = {document.label for document in valid if document.name in names}
    kept = [document for document in train if document.label not in shared]
    held_out = [document for document in valid if document.label not in shared]
    for label in sorted(shared):
        documents = [document for document in train if document.label == label]
        if len(documents) >= _HELD_OUT:
            held_out += documents[_HELD_OUT - 1 :: _HELD_OUT]
            kept += [d for i, d in enumerate(documents) if i % _HELD_OUT != _HELD_OUT - 1]
            continue
        for document in documents:
            cut = len(document.text) * (_HELD_OUT - 1) // _HELD_OUT
            kept.append(replace(document, text=document.text[:cut]))
            held_out.append(replace(document, text=document.text[cut:]))
    return kept, held_out
