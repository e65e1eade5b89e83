"""Trains the demonstration model.

    python scripts/train_demo_model.py CORPUS --work build/demo --minutes 95 --chat-minutes 8

To resume, run the same command again. See docs/measured/demo-model.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from demo_model.network import Shape
from demo_model.training import Recipe, train, tune_chat


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demonstration model.")
    parser.add_argument("corpus", type=Path, help="folder of <domain>/{train,valid}.txt.xz")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and logs")
    parser.add_argument("--minutes", type=float, default=95, help="training time over all runs")
    parser.add_argument("--chat-minutes", type=float, default=8, help="the chat phase after it")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = Recipe(budget_s=arguments.minutes * 60, chat_s=arguments.chat_minutes * 60)
    train(arguments.corpus, arguments.work, Shape(), recipe)
    tune_chat(arguments.corpus, arguments.work, Shape(), recipe)


if __name__ == "__main__":
    main()
