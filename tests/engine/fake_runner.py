"""A pipeline without a model: the next token is a hash of the last token and its position."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.model.step_plan import StepPlan

VOCAB_SIZE = 50


def next_token(last_token: int, position: int) -> int:
    """Never 0, so that no test ends by accident."""
    return 1 + (last_token * 31 + position * 17) % (VOCAB_SIZE - 1)


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the fake model answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens) - 1))
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements StepRunner; remembers the plans; can be told to fail or to give NaN."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.cleared: list[int] = []
        self.fails_next = False
        self.nan_after_token: int | None = None
        self.fails_on_token: int | None = None

    def run(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the device is on fire")
        rows = []
        for piece in plan.slices:
            if self.fails_on_token in piece.token_ids:
                raise RuntimeError(f"token {self.fails_on_token} is poison")
            end = piece.start + len(piece.token_ids)
            assert len(piece.page_table) * 16 >= end, "a slice has pages for its tokens"
            for position in range(end - piece.num_logits, end):
                token = int(piece.token_ids[position - piece.start])
                row = torch.zeros(VOCAB_SIZE)
                row[next_token(token, position)] = 5.0
                if token == self.nan_after_token:
                    row[:] = float("nan")
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def clear_pages(self, pages: list[int]) -> None:
        self.cleared += pages
