"""Decides how many prompt tokens a step may read, so that decoding requests keep their time between
tokens.

    c* = the largest c with T(decode rows, c) + margin <= least tpot - time since the last step

It is rounded down to pages and never less than `min_prefill_tokens`: a target that cannot be kept
must not stop the reading of prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.service.step_model import StepModel, StepWork

_MARGIN = 0.15  # of the predicted time


class StepBudget:
    """The rule of one server. `slack_s` is what the tightest request leaves for the next step."""

    def __init__(self, model: StepModel, least: int, page_size: int) -> None:
        self._model, self._least, self.page_size = model, least, page_size

    def prompt_tokens(self, rows: StepWork, slack_s: float | None, most: int) -> int:
        """Returns how many prompt tokens may be added to `rows`, at most `most`. `slack_s` None: no
        request that decodes has a target."""
        if slack_s is None or not self._model.is_measured or most <= self._least:
            return most
        size = self.page_size
        low, high = self._least // size, most // size  # in pages: low is allowed
        if self._fits(rows, most, slack_s):
            return most
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(rows, middle * size, slack_s):
                low = middle
            else:
                high = middle - 1
        return max(self._least, low * size)

    def _fits(self, rows: StepWork, num_prompt: int, slack_s: float) -> bool:
        predicted_s = self._model.seconds(replace(rows, num_prompt=num_prompt))
        return predicted_s * (1 + _MARGIN) <= slack_s


def shared_out(total: int, wanted: list[int], page_size: int) -> list[int]:
    """Shares a budget of prompt tokens evenly among attention ranks, each up to the number that it
    wants:

    total 96, wanted 16 200 64, pages of 16 -> 16 32 32, and the 16 that are left for the second
    """
    given = [0] * len(wanted)
    left = total
    open_ranks = [rank for rank, count in enumerate(wanted) if count]
    while open_ranks and left:
        share = max(page_size, left // len(open_ranks) // page_size * page_size)
        for rank in list(open_ranks):
            count = min(share, wanted[rank] - given[rank], left)
            given[rank] += count
            left -= count
            if given[rank] == wanted[rank]:
                open_ranks.remove(rank)
    return given


def rows_of_decoding(decoding: Items[Sequence]) -> StepWork:
    """Returns the work of a step in which these sequences decode."""
    return StepWork(len(decoding), 0, sum([s.num_tokens for s in decoding]))


def least_tpot_s(decoding: Iterable[Sequence]) -> float | None:
    """Returns the tightest target for the time between tokens; None: none of them has one."""
    targets = [s.request.service.targets.tpot_s for s in decoding]
    return min((each for each in targets if each is not None), default=None)
