"""Reads prompts from a file: JSON lines with `prompt` or `messages`, or text with one prompt per
line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_serve.bench.workload.request import Prompt
from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePrompt:
    """One line. `output_tokens` is None if the line does not state it."""

    prompt: Prompt
    output_tokens: int | None = None


def read_prompts(path: Path) -> tuple[FilePrompt, ...]:
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
            raise BenchError(f"line {number} of {path} has output_tokens {num_output!r}.")
    return FilePrompt(prompt=prompt, output_tokens=num_output)


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(item, dict) for item in prompt) or all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompt
    )
