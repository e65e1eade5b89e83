"""The waiting requests of a server with service tiers, in groups of equal urgency.

The batch policy may choose only within a group, so it has less freedom than without tiers. The
order is the server's own (ATC); steps take 20 ms, and prompts have the lengths of a chat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from moe_serve.config.sections import SchedulerConfig
from moe_serve.config.tiers import TierConfig
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.service_terms import Service, Targets
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.order import StartOrder, bucket_of, rule_of
from moe_serve.engine.service.ranked_waiting import RankedWaiting
from moe_serve.engine.service.waiting_table import WaitingTable

STEP_S, TOKEN_S = 0.02, 3e-5
TIERS = (
    TierConfig(name="interactive", weight=4.0, ttft_s=1.0),
    TierConfig(name="normal", weight=2.0, ttft_s=5.0),
    TierConfig(name="flex", weight=1.0, ttft_s=60.0),
)
SHARES = (0.5, 0.3, 0.2)
_USUAL_TOKENS, _SPREAD = 700.0, 1.0  # median of the prompts, and of the logarithm


class TierGroups:
    """The table of waiting requests. The same seed gives the same tiers and prompts."""

    def __init__(self, seed: int) -> None:
        config = SchedulerConfig(tiers=TIERS, order="atc")
        rule = rule_of(config, lambda: _USUAL_TOKENS * TOKEN_S)
        self._order = StartOrder(rule, config.max_wait_s, config.late, bucket_of(config))
        self._table, self._rng = WaitingTable(), np.random.default_rng([seed, 7])
        self.group_sizes: list[int] = []  # of the first group of each step

    def add(self, sequence: Sequence, step: int) -> None:
        place = int(self._rng.choice(len(TIERS), p=SHARES))
        tier, now_s = TIERS[place], STEP_S * step
        num_left = int(_USUAL_TOKENS * math.exp(_SPREAD * float(self._rng.standard_normal())))
        targets = Targets(ttft_s=tier.ttft_s)
        service = Service(tier=tier.name, weight=tier.weight, targets=targets)
        sequence.request = replace(sequence.request, service=service)
        assert tier.ttft_s is not None, "all have a target"
        sequence.standing = Standing(
            queued_s=now_s, deadline_s=now_s + tier.ttft_s, clock=lambda: now_s, tier=place,
            num_left=max(1, num_left),
        )  # fmt: skip
        self._table.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._table.remove(sequence)

    def groups(self, step: int) -> Iterator[Items[Sequence]]:
        """Yields the groups, the most urgent first."""

        def keys() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return self._order.keys(self._table, STEP_S * step, TOKEN_S, None)

        for number, group in enumerate(
            RankedWaiting(self._table, keys, self._order.bucket_s).groups(math.inf)
        ):
            if not number:
                self.group_sizes.append(len(group))
            yield group
