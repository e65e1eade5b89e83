"""Exports the demonstration model from its training checkpoint, and checks the result.

    python scripts/export_demo_model.py --work build/demo --out moe_serve/demo_model

The check loads the folder with transformers and compares its loss with the trained network's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from demo_model.export import export, load_exported
from demo_model.network import Shape
from demo_model.training import Recipe
from demo_model.verify import compare_with_transformers, sample_text


def main() -> int:
    parser = argparse.ArgumentParser(description="Export the demonstration model.")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="training folder")
    parser.add_argument("--out", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--corpus", type=Path, help="compare on its valid texts instead of a chat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-check", action="store_true", help="do not compare with transformers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size = export(arguments.work, arguments.out, Shape(), Recipe(budget_s=0))
    sys.stdout.write(f"{arguments.out}: {size / 2**20:.2f} MiB of 32 MiB\n")
    if arguments.no_check:
        return 0
    network = load_exported(arguments.out, Shape())
    text = sample_text(arguments.corpus)
    comparison = compare_with_transformers(arguments.out, network, text)
    sys.stdout.write(comparison.describe() + "\n")
    return 0 if comparison.is_close else 1


if __name__ == "__main__":
    raise SystemExit(main())
