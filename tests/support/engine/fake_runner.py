"""A pipeline without a model, but with pages: the next token is a hash of all tokens before it.

Every token is read back from the pages, so a wrong, stale or overwritten page changes the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_serve.model.step_plan import StepPlan

VOCAB_SIZE = 50
PAGE_SIZE = 16
NAN = -1  # in a slot: what was written there is not finite


def next_token(tokens: list[int]) -> int:
    """Returns a token that is never 0 and never the last id, so that no test ends or fails by
    accident."""
    return _token_of(_state_after(tokens))


def continuation(prompt: list[int], count: int) -> list[int]:
    """Returns the tokens that the fake model answers."""
    state, answer = _state_after(prompt), list[int]()
    for _ in range(count):
        answer.append(_token_of(state))
        state = _state_after(answer[-1:], state)
    return answer


def _state_after(tokens: list[int], state: int = 7) -> int:
    for token in tokens:
        state = (state * 31 + token + 17) % 1_000_003
    return state


def _token_of(state: int) -> int:
    return 1 + state % (VOCAB_SIZE - 2)


class FakeRunner:
    """Implements StepRunner, remembers the plans, and can fail or give NaN on demand."""

    def __init__(self, page_size: int = PAGE_SIZE) -> None:
        self.page_size = page_size
        self.plans: list[StepPlan] = []
        self.cleared: list[int] = []
        self.copied: list[tuple[int, int]] = []
        self.slots = {0: [0] * page_size}  # page -> its tokens; page 0 is the empty page
        self.fails_next = False
        self.nan_after_token: int | None = None
        self.fails_on_token: int | None = None

    @property
    def num_computed_tokens(self) -> int:
        return sum(len(piece.token_ids) for plan in self.plans for piece in plan.slices)

    def run(self, plan: StepPlan) -> Tensor:
        self.plans.append(plan)
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the device is on fire")
        for piece in plan.slices:
            if self.fails_on_token in piece.token_ids:
                raise RuntimeError(f"token {self.fails_on_token} is poison")
            self._write(piece.key_start, piece.token_ids.tolist(), piece.page_table)
        rows = []
        for piece in plan.slices:
            end = piece.key_start + len(piece.token_ids)
            rows += self._rows(end - piece.num_logits, end, piece.page_table)
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def clear_pages(self, pages: list[int]) -> None:
        self.cleared += pages
        for page in pages:
            self.slots[page] = [0] * self.page_size

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self.copied += pairs
        contents = [list(self.slots[source]) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self.slots[target] = content

    def finite_pages(self, pages: list[int]) -> list[bool]:
        return [NAN not in self.slots[page] for page in pages]

    def _write(self, start: int, tokens: list[int], table: tuple[int, ...]) -> None:
        assert len(table) * self.page_size >= start + len(tokens), "a slice has its pages"
        for position, token in enumerate(tokens, start):
            page = self.slots.setdefault(table[position // self.page_size], [0] * self.page_size)
            page[position % self.page_size] = NAN if token == self.nan_after_token else token

    def _rows(self, first: int, end: int, table: tuple[int, ...]) -> list[Tensor]:
        """Returns the logits of positions [first, end). A NaN anywhere in a page spoils a row, also
        behind it, because a masked value is multiplied by 0."""
        rows = []
        for position in range(first, end):
            pages = table[: position // self.page_size + 1]
            slots = [slot for page in pages for slot in self.slots[page]]
            row = torch.zeros(VOCAB_SIZE)
            row[next_token(slots[: position + 1])] = 5.0
            if NAN in slots:
                row[:] = float("nan")
            rows.append(row)
        return rows
