"""Writes a trained head as the files that the server reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MAX_BUNDLED_BYTES = 4 * 2**20  # of the demonstration model's head
HEAD_FILE, FIGURES_FILE = "head.safetensors", "figures.json"


def export_weights(
    checkpoint: Path, folder: Path, max_bytes: int | None = None
) -> dict[str, int | float]:
    """Writes the averaged weights in bf16; returns the facts of the training.

    Raises ValueError above `max_bytes`.
    """
    prefix = "average."
    tensors = {
        name.removeprefix(prefix): tensor.to(torch.bfloat16)
        for name, tensor in load_file(checkpoint).items()
        if name.startswith(prefix)
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / HEAD_FILE
    save_file(tensors, path, {"format": "pt"})
    path.chmod(0o644)
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"{path} holds {size} bytes; the limit is {max_bytes}.")
    with safe_open(checkpoint, "pt") as file:
        facts = file.metadata()
    return {
        "bytes": size,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "positions": int(facts["positions"]),
        "minutes": round(float(facts["spent"]) / 60, 1),
    }


def write_figures(folder: Path, figures: dict[str, Any]) -> None:
    """Writes the figures of a head beside its weights."""
    text = json.dumps(figures, indent=2) + "\n"
    (folder / FIGURES_FILE).write_text(text, encoding="utf-8")
