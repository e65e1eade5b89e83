"""Where the demonstration model lies."""

from __future__ import annotations

from pathlib import Path

import moe_serve


def demo_model_folder() -> Path:
    """The checkpoint that the package carries, in Hugging Face layout."""
    return Path(moe_serve.__file__).parent / "demo_model"
