"""Trains a drafting head for a model, from texts.

    python scripts/train_speculation_head.py CORPUS --work build/head --shards 40 --minutes 60

Two phases: the model reads and continues the texts (`--only shards`), then the head learns from
what was kept (`--only head`). Both may run at the same time. To resume, run the same command again.
See docs/guide/train-speculation-head.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from moe_serve.text.tokenizer import Tokenizer
from speculation_head.network import DraftingHead, HeadShape
from speculation_head.shards import Recipe, make_shards, read_pieces
from speculation_head.target import TargetModel
from speculation_head.training import Schedule, Training


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a drafting head.")
    parser.add_argument("corpus", type=Path, help="folder of <domain>/{train,valid}.txt.xz")
    parser.add_argument("--model", help="checkpoint folder (default: the demonstration model)")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for shards and checkpoints"
    )
    parser.add_argument("--only", choices=("shards", "head"), help="run one phase only")
    parser.add_argument("--shards", type=int, default=40, help="files of about 100 000 positions")
    parser.add_argument("--minutes", type=float, default=60, help="training time over all runs")
    parser.add_argument("--hidden", type=int, default=640, help="hidden width of a block")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.5, help="of the learnt distribution")
    parser.add_argument("--no-chats", action="store_true", help="make no ChatML chats of the texts")
    parser.add_argument("--checkpoint", type=Path, help="folder of the head's checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target = TargetModel(arguments.model, arguments.threads)
    if arguments.only != "head":
        recipe, tokenizer = Recipe(), Tokenizer.load(target.folder)
        has_chats = not arguments.no_chats
        pieces = read_pieces(arguments.corpus, "train", tokenizer, has_chats, recipe.seed)
        make_shards(target, pieces, arguments.work, recipe, arguments.shards)
    if arguments.only != "shards":
        shape = HeadShape(
            width=target.spec.width,
            hidden=arguments.hidden,
            num_blocks=arguments.blocks,
            norm_eps=target.spec.norm_eps,
        )
        schedule = Schedule(budget_s=arguments.minutes * 60, temperature=arguments.temperature)
        torch.manual_seed(schedule.seed)
        head = DraftingHead(shape, target.embedding(), target.final_norm())
        folder = arguments.checkpoint or arguments.work
        Training(head, target.output_matrix(), arguments.work, folder, schedule).run()


if __name__ == "__main__":
    main()
