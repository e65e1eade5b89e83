"""Locates the demonstration model."""

from __future__ import annotations

from pathlib import Path

import moe_serve


def demo_model_folder() -> Path:
    """Return the folder of the bundled checkpoint, in Hugging Face layout."""
    return Path(moe_serve.__file__).parent / "demo_model"
