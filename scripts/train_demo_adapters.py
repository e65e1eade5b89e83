"""Trains the example adapters of the demonstration model on this project's documentation.

    python scripts/train_demo_adapters.py CORPUS --out moe_serve/demo_model/adapters

Writes a LoRA of attention and an ESFT. Prints the bits per byte of valid text without and with each
of them: of the documentation, and of the domains that the model was trained on (CORPUS). See
docs/guide/adapters.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from demo_model.adapters import (
    AdapterRecipe,
    read_manual,
    served_bits,
    train_adapter,
    windows,
)
from demo_model.corpus import Corpus
from demo_model.export import load_exported
from demo_model.network import Shape
from moe_serve.offline.llm import LLM

RECIPES = {
    "manual-lora": AdapterRecipe(num_steps=80, learning_rate=4e-3, rank=16),
    "manual-esft": AdapterRecipe(num_steps=80, learning_rate=3e-3, num_experts=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example adapters.")
    parser.add_argument("corpus", type=Path, help="folder of <domain>/{train,valid}.txt.xz")
    parser.add_argument("--model", type=Path, default=Path("moe_serve/demo_model"))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="pages of the manual")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=[*RECIPES, "none"], help="train this one alone")
    parser.add_argument("--windows", type=int, default=40, help="of 512 tokens, of each domain")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, valid_pages = read_manual(arguments.docs)
    valid = {"manual": valid_pages, **Corpus.read(arguments.corpus, "valid").documents}
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    for name, recipe in RECIPES.items():
        if arguments.only in (None, name):
            network = load_exported(arguments.model, Shape())
            train_adapter(network, tokenizer, train, recipe).save(arguments.out / name)
    prompts = {
        domain: windows(tokenizer, texts, width=512, count=arguments.windows)
        for domain, texts in valid.items()
    }
    print("| | " + " | ".join(prompts) + " |", flush=True)
    folders = {name: str(arguments.out / name) for name in RECIPES}
    with LLM(str(arguments.model), adapters=folders) as llm:
        for adapter in (None, *folders):
            bits = [served_bits(llm, tokenizer, each, adapter) for each in prompts.values()]
            row = " | ".join(f"{each:.3f}" for each in bits)
            print(f"| {adapter or 'base model'} | {row} |", flush=True)


if __name__ == "__main__":
    main()
