"""Prompts of mixed domains: pieces of the texts in turn, drawn with a seed."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_serve.text.tokenizer import Tokenizer

_MAX_CHARACTERS = 300_000  # of a file
BUILT_IN = (
    "The harbour was quiet that morning. Old Anna carried her basket along the wall, counting the "
    "boats that had come back and the ones that had not, and said nothing to anybody. ",
    "def merge(left, right):\n    result = []\n    while left and right:\n        side = left if "
    "left[0] <= right[0] else right\n        result.append(side.pop(0))\n    return result\n",
    "Sei f eine stetige Funktion auf einem abgeschlossenen Intervall. Dann nimmt f dort ihr "
    "Maximum und ihr Minimum an. Der Vertrag bedarf zu seiner Wirksamkeit der Schriftform. ",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take? "
    "Answer: From 9:40 to 12:00 are 140 minutes, and 5 more make 145 minutes. ",
)


def token_streams(paths: Sequence[Path], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each text: of the given files (.xz too), or of built-in texts."""
    texts = [_text(path) for path in paths] or [text * 40 for text in BUILT_IN]
    return [tokenizer.encode(text) for text in texts]


def draw(
    streams: Sequence[Sequence[int]], count: int, num_tokens: int, seed: int
) -> list[tuple[int, ...]]:
    """Draws `count` pieces from the streams in turn."""
    rng = np.random.default_rng(seed)
    pieces = []
    for index in range(count):
        stream = streams[index % len(streams)]
        start = int(rng.integers(0, max(1, len(stream) - num_tokens)))
        pieces.append(tuple(stream[start : start + num_tokens]))
    return pieces


def _text(path: Path) -> str:
    if path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_CHARACTERS)
    return path.read_text(encoding="utf-8", errors="replace")[:_MAX_CHARACTERS]
