"""Exports a drafting head from its training checkpoint, and measures how many drafts are accepted.

    python scripts/export_speculation_head.py CORPUS --work build/head

The model continues unseen texts; the head and a table of n-grams draft for each place of them. The
folder gets the weights, figures.json and a card. It may be run while the training goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from moe_serve.text.tokenizer import Tokenizer
from speculation_head.acceptance import Sizes
from speculation_head.card import write_card
from speculation_head.export import MAX_BUNDLED_BYTES, export_weights, write_figures
from speculation_head.figures import judge
from speculation_head.ngram_table import NgramTable
from speculation_head.shards import Recipe, read_pieces
from speculation_head.target import TargetModel


def main() -> None:
    parser = argparse.ArgumentParser(description="Export and judge a drafting head.")
    parser.add_argument("corpus", type=Path, help="folder of <domain>/{train,valid}.txt.xz")
    parser.add_argument("--model", help="checkpoint folder (default: the demonstration model)")
    parser.add_argument("--work", type=Path, required=True, help="folder of the head's checkpoint")
    parser.add_argument("--out", type=Path, help="default: speculation_head/ in the model's folder")
    parser.add_argument("--texts", type=int, default=48, help="generated texts of each label")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of a generated text")
    parser.add_argument("--no-chats", action="store_true", help="make no ChatML chats of the texts")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, recipe = TargetModel(arguments.model, arguments.threads), Recipe()
    out = arguments.out or target.folder / "speculation_head"
    max_bytes = MAX_BUNDLED_BYTES if arguments.model is None else None
    facts = export_weights(arguments.work / "head.safetensors", out, max_bytes)
    tokenizer, has_chats = Tokenizer.load(target.folder), not arguments.no_chats
    train, unseen = (
        read_pieces(arguments.corpus, split, tokenizer, has_chats, recipe.seed)
        for split in ("train", "valid")
    )
    table = NgramTable([piece.tokens for piece in train], target.spec.vocab_size)
    sizes = Sizes(texts_per_label=arguments.texts, count=arguments.tokens)
    figures = judge(target, out, table, unseen, sizes)
    figures["training"] = facts
    figures["table"] = {"tokens": sum(len(piece.tokens) for piece in train)}
    write_figures(out, figures)
    write_card(out, figures)
    sys.stdout.write((out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
