"""Caches the facts of compiled kernels, one small JSON file each, in the user's cache folder."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path

from kernel_compilation.facts import CompiledFacts
from moe_kernels.cpu.cpu_library import cache_folder

_FIELDS = {field.name for field in dataclasses.fields(CompiledFacts)}


def facts_folder() -> Path:
    """Returns the cache folder, beside the compiled CPU kernels."""
    return cache_folder() / "kernel-facts"


def load(key: str, folder: Path) -> CompiledFacts | None:
    """Return the facts under this key; None if absent or written by another version."""
    try:
        found = json.loads((folder / f"{key}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return CompiledFacts(**found) if isinstance(found, dict) and set(found) == _FIELDS else None


def store(key: str, facts: CompiledFacts, folder: Path) -> None:
    """Writes the file completely or not at all, because two processes may compile the same
    kernel."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".part")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(facts), file)
    Path(name).replace(folder / f"{key}.json")
