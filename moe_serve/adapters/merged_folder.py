"""Keeps merged checkpoints in the user's cache, by the content of model and adapter."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moe_kernels.cpu.cpu_library import cache_folder
from moe_serve.adapters.adapter_files import open_unchanged
from moe_serve.adapters.merge import merge_adapter
from moe_serve.cache.page_key import model_identity
from moe_serve.regular_file import is_there

_VERSION = "1"  # of what `merge_adapter` writes
_DIGITS = 32


def merged_root() -> Path:
    """Returns the folder of all merged checkpoints. Any of them may be deleted."""
    return cache_folder() / "merged"


def merged_folder(base: Path, adapter: Path) -> Path:
    """Returns the folder of a model with an adapter merged into it, which is written if it is not
    there yet. Raises CheckpointError."""
    with open_unchanged(adapter) as files:
        digest = hashlib.sha256(model_identity(base, _VERSION) + files.digest).hexdigest()
    name = f"{base.resolve().name}-{adapter.resolve().name}"
    folder = merged_root() / digest[:_DIGITS] / name
    if not is_there(folder / "config.json"):
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        merge_adapter(base, adapter, folder)
    return folder
