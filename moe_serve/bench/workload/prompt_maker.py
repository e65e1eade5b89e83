"""The prompts of a workload: random words or token ids with pieces that requests share, or a file.

The same seed gives the same prompts on every machine. Another seed shares nothing with it, so that
a second run does not find the first one's prompts in the server's prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file

# Text, token ids, or the messages of a chat.
Prompt: TypeAlias = "str | list[int] | list[dict[str, Any]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a prompt; blocks with the same `key` have the same text."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The time and size of a request, from a trace or from drawn lengths; the text is added
    later."""

    index: int
    at_s: float  # when it is due; meaningless in a closed loop
    prompt_tokens: int  # of the whole prompt
    output_tokens: int
    blocks: tuple[Block, ...] = ()  # how the prompt begins
    prompt: Prompt | None = None  # its own text, where the workload has one
    tier: str = ""  # the name of its service tier
    tenant: str = ""  # who sends it
    session: str = ""  # requests of one conversation or task have the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A request that is ready to be sent."""

    index: int
    at_s: float
    output_tokens: int
    body: bytes
    tier: str = ""
    tenant: str = ""
    session: str = ""


DataKind = Literal["words", "tokens"]

_FIRST_TOKEN_ID = 16  # below it many vocabularies have ids that steer the model
_MAX_BLOCKS_KEPT = 4096
_UNIQUE, _SHARED = 1, 2  # which stream of random numbers
# Short and frequent: nearly every tokenizer has one token for each, with the space before it.
_TEXT = """
the of and to in is that was for on are with they be at one have this from by hot word but what some
we can out other were all there when up use your how said an each she which do their time if will
way about many then them write would like so these her long make thing see him two has look more day
could go come did number sound no most people my over know water than call first who may down side
been now find any new work part take get place made live where after back little only round man year
came show every good me give our under
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextScale:
    """The tokens a server counts for words: `overhead + per_word * num_words`."""

    per_word: float = 1.0
    overhead: float = 0.0

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.overhead) / self.per_word))

    @classmethod
    def through(cls, short: tuple[int, int], long: tuple[int, int]) -> TextScale:
        """Fits the line through two measurements (words, tokens); assumes one token per word if
        they are implausible."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        if per_word <= 0:
            return cls()
        return cls(per_word=per_word, overhead=max(0.0, short[1] - per_word * short[0]))


class PromptMaker:
    """Writes the prompt of a slot: its shared blocks, then its own text up to the slot's length."""

    def __init__(
        self,
        *,
        kind: DataKind,
        seed: int,
        vocab_size: int = 1000,
        scale: TextScale | None = None,
    ) -> None:
        self._kind: DataKind = kind
        self._seed = seed
        self._vocab_size = vocab_size
        self._scale = scale or TextScale()
        self._block = lru_cache(_MAX_BLOCKS_KEPT)(self._make_block)

    def prompt(self, slot: Slot) -> Prompt:
        if slot.prompt is not None:
            return slot.prompt
        pieces = [self._block(block.key, block.num_tokens) for block in slot.blocks]
        num_units = slot.prompt_tokens
        if self._kind == "words":
            num_units = self._scale.num_words(num_units)
        num_rest = num_units - sum(len(piece) for piece in pieces)
        rng = np.random.default_rng([self._seed, _UNIQUE, slot.index])
        if num_rest > 0:
            pieces.append(self._draw(rng, num_rest))
        units_N = np.concatenate(pieces)[: max(1, num_units)]
        if self._kind == "tokens":
            ids: list[int] = units_N.tolist()
            return ids
        return " ".join([WORDS[unit] for unit in units_N])

    def _make_block(self, key: str, num_tokens: int) -> np.ndarray:
        """Returns the same units for the same key, for any number of them."""
        rng = np.random.default_rng([self._seed, _SHARED, *key.encode()])
        num_units = num_tokens
        if self._kind == "words":
            num_units = max(1, round(num_tokens / self._scale.per_word))
        return self._draw(rng, num_units)

    def _draw(self, rng: np.random.Generator, num_units: int) -> np.ndarray:
        if self._kind == "words":
            return rng.integers(0, len(WORDS), num_units)
        return rng.integers(_FIRST_TOKEN_ID, self._vocab_size, num_units)


def probe_prompts(seed: int) -> Iterator[tuple[int, str]]:
    """Returns (words, text) of two lengths, to measure the server's tokens per word."""
    for num_words in (16, 272):
        rng = np.random.default_rng([seed, _UNIQUE, 2**31 + num_words])
        yield num_words, " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), num_words))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrompt:
    """One line. `output_tokens` is None if the line does not state it."""

    prompt: Prompt
    output_tokens: int | None = None


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
    """Reads JSON lines with `prompt` or `messages`, or text with one prompt per line."""
    try:
        # Not `splitlines`: JSON may hold U+2028 and the like in a string.
        lines = regular_file(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise BenchError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}."
        ) from None
    except UnicodeDecodeError:
        raise BenchError(f"{path} is not text in UTF-8.") from None
    is_json = path.suffix in (".jsonl", ".json")
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_json_line(line, number, path) if is_json else FilePrompt(prompt=line))
    if not prompts:
        raise BenchError(f"{path} has no prompts.")
    return tuple(prompts)


def _json_line(line: str, number: int, path: Path) -> FilePrompt:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    prompt = row.get("prompt", row.get("messages")) if isinstance(row, dict) else row
    if prompt is None or not _is_prompt(prompt):
        raise BenchError(
            f"line {number} of {path} has no prompt: it takes a string, "
            '{"prompt": text or token ids} or {"messages": [...]}.'
        )
    num_output = None
    if isinstance(row, dict):
        num_output = row.get("output_tokens", row.get("max_tokens"))
        if num_output is not None and not (isinstance(num_output, int) and num_output > 0):
            raise BenchError(
                f"line {number} of {path}: output_tokens must be an integer of 1 or more, got "
                f"{num_output!r}."
            )
    return FilePrompt(prompt=prompt, output_tokens=num_output)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(item, dict) for item in prompt) or all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompt
    )
