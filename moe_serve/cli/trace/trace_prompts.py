"""Reads the prompts of `moe-serve trace record`: one per line, or one JSON object per line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import InvalidRequestError
from moe_serve.json_text import parse_json
from moe_serve.regular_file import regular_file


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """A prompt to run: text or token ids, and a label for its kind (a domain, a data set)."""

    prompt: str | list[int]
    label: str = ""


def read_prompts(path: Path) -> list[TracePrompt]:
    """Reads prompts. A file named *.jsonl holds objects {"prompt": ..., "label": ...}; any other
    file one prompt on each line that is not empty. Raises InvalidRequestError."""
    try:
        # Not `splitlines`: JSON may hold U+2028 and the like in a string.
        lines = regular_file(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise _wrong(f"{path} is not UTF-8 text.") from None
    is_json = path.suffix == ".jsonl"
    prompts = [
        _parse(line, f"{path}:{number}") if is_json else TracePrompt(line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise _wrong(f"{path} has no prompts.")
    return prompts


def _parse(line: str, place: str) -> TracePrompt:
    try:
        entry = parse_json(line)
    except (ValueError, RecursionError):
        raise _wrong(f"{place} is not JSON.") from None
    if not isinstance(entry, dict) or entry.keys() - {"prompt", "label"}:
        raise _wrong(f'{place} is not an object {{"prompt": ..., "label": ...}}.')
    prompt, label = entry.get("prompt"), entry.get("label", "")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise _wrong(f"{place}: prompt is neither text nor a list of token ids, or it is empty.")
    if not isinstance(label, str):
        raise _wrong(f"{place}: label is {label!r}, not text.")
    return TracePrompt(prompt, label)


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompts")
