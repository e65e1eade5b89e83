"""Writes a random MoE checkpoint in Hugging Face layout: sharded safetensors with an index.

    python scripts/make_random_model.py build/random-1b
    python scripts/make_random_model.py build/tiny --family mixtral --num-layers 2 --width 64

The defaults make a Qwen3-MoE of 1.26 B parameters in bf16. The same flags and seed give the same
files.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from random_model.families import FAMILIES, Sizes
from random_model.writer import DTYPES, borrow_tokenizer, write_random_model


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a random MoE checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3_moe")
    for field in fields(Sizes):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "is_tied":
            parser.add_argument("--tied", dest="is_tied", action="store_true", help="tie the head")
        else:
            parser.add_argument(flag, type=int, default=field.default, help="default %(default)s")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-mib", type=int, default=512, help="largest size of a file in MiB")
    parser.add_argument("--tokenizer", type=Path, default=Path("moe_serve/demo_model"))
    arguments = parser.parse_args()
    sizes = Sizes(**{field.name: getattr(arguments, field.name) for field in fields(Sizes)})
    num_parameters = write_random_model(
        arguments.folder,
        arguments.family,
        sizes,
        dtype=arguments.dtype,
        seed=arguments.seed,
        shard_bytes=arguments.shard_mib * 2**20,
    )
    has_tokenizer = borrow_tokenizer(arguments.tokenizer, arguments.folder)
    note = "" if has_tokenizer else f", no tokenizer ({arguments.tokenizer} has none)"
    sys.stdout.write(f"{arguments.folder}: {num_parameters / 1e6:,.1f} M parameters{note}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
