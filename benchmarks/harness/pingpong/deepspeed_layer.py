"""DeepSpeed's MoE layer with expert-parallel all-to-all, on two ranks of a core each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def run_deepspeed(model: Path, options: argparse.Namespace, cores: Sequence[int] | None) -> str:
    return "deepspeed is not installed"
