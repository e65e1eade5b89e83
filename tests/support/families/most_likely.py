"""Greedy tokens of transformers without generating: what it finds likeliest behind given ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers


def most_likely(
    model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]
) -> list[int]:
    """What transformers finds most likely after the prompt and each of `tokens` but the last. Equal
    to `tokens` exactly where they are its greedy continuation: each follows from those before."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return chosen
