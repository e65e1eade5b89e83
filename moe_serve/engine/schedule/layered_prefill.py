"""Decides which prompts pass the model in groups of layers instead of chunks of tokens.

A group costs as much as the chunk that the step's budget would allow, so a budget means the same
time with both (`layered_costs.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from moe_serve.config.sections import EngineConfig, LayeredPrefillName
from moe_serve.engine.request.sequence import Schedule, Sequence
from moe_serve.engine.schedule.layered_costs import LayeredCosts
from moe_serve.model.spec import ModelSpec
from moe_serve.model.step_plan import LayerRange

_log = logging.getLogger(__name__)

_MOST_TOKENS = 8192  # of a prompt that pass a layer together: their frames have to fit into memory
_STATES = 2  # of a parked token: before the last step's layers, and behind them
_LEAST_GAIN = 0.05  # predicted, for `auto`
_GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # layers of a step that are considered


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of a sequence that a step computes, their cost in the step's budget, and their
    layers if they pass some only."""

    count: int
    cost: int
    layers: LayerRange | None = None


_ONE_TOKEN = Share(1, 1)


@dataclass(frozen=True, slots=True)
class _GroupOffer:
    """A way to read a prompt: the number of tokens that pass layers together, and the predicted
    cost of the whole prompt with the rows beside it."""

    count: int
    cost: float


class LayeredPrefill:
    """Gives each scheduled sequence its share of a step. One prompt at a time is parked."""

    def __init__(
        self,
        costs: LayeredCosts | None,
        mode: LayeredPrefillName,
        parked_bytes: int,
        state_bytes: int,
    ) -> None:
        """With `costs` None every prompt is cut into chunks. `state_bytes` is the size of a token's
        state.
        """
        self._costs, self._is_always = None if mode == "off" else costs, mode == "on"
        self._most = min(_MOST_TOKENS, parked_bytes // (_STATES * max(1, state_bytes)))
        self._parked: Sequence | None = None
        self._saved = 0.0  # unused budget of steps in which it was too small for the parked prompt
        self._ranges: dict[int, LayerRange] = {}
        self._spent: dict[int, int] = {}

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, device: str, dtype: str) -> LayeredPrefill:
        """Builds it for one attention rank, from the names of its device and data type."""
        scheduler = config.scheduler
        costs = LayeredCosts.of(
            spec, device.partition(":")[0], max(1, config.cluster.attention_ranks)
        )
        refusal = None
        if costs is None:
            refusal = "the model has no layer with routed experts"
        elif config.speculation.method == "mtp":
            refusal = "drafts of the model's MTP layer need the states of all rows of a step"
        if refusal is not None and scheduler.layered_prefill != "off":
            _log.info("scheduler.layered_prefill is off: %s.", refusal)
        state_bytes = spec.width * (4 if dtype == "float32" else 2)
        return cls(
            None if refusal is not None else costs,
            scheduler.layered_prefill,
            scheduler.parked_bytes,
            state_bytes,
        )

    @property
    def ranges(self) -> Mapping[int, LayerRange]:
        """The layers of the sequences in the scheduled step that take part in some only."""
        if self._parked is not None and not self._parked.is_running:
            return {}  # it was preempted after it got its share
        return self._ranges

    @property
    def parked(self) -> tuple[int, ...]:
        """The sequence whose tokens have passed some layers, if there is one."""
        sequence = self._parked
        if sequence is None or not (sequence.is_running and sequence.num_parked_tokens):
            return ()
        return (sequence.id,)

    @property
    def is_busy(self) -> bool:
        """Returns whether the scheduled step has tokens that take part in some layers only, or some
        are parked."""
        return bool(self.ranges or self.parked)

    def begin(self) -> None:
        """Begins to schedule a step."""
        if self._ranges:
            self._ranges, self._spent = {}, {}

    def share(self, sequence: Sequence, budget: int, chosen: Schedule) -> Share:
        """Returns a sequence's share of the remaining budget. `chosen`: the sequences before it."""
        if budget > 0 and len(sequence.token_ids) - sequence.num_computed_tokens == 1:
            return _ONE_TOKEN
        joint = sequence.num_joint_tokens
        count = min(joint, budget)
        is_cut = (
            joint < sequence.num_pending_tokens
        )  # it recomputes tokens that saw different pages
        if self._costs is None or budget <= 0 or is_cut:
            return Share(count, count)
        if not sequence.num_parked_tokens:
            is_whole = sequence.num_pending_tokens <= budget
            if is_whole or self.is_busy or sequence.wants_prompt_logprobs:
                return Share(count, count)
        num_rows = sum([n for _, n in chosen.values()])
        if sequence.num_parked_tokens:
            return self._advance(self._costs, sequence, budget, num_rows)
        together = self._tokens_together(self._costs, sequence, budget, num_rows)
        if together == 0:
            return Share(count, count)
        return self._layers(self._costs, 0, together, budget, num_rows) or Share(count, count)

    def take(self, sequence: Sequence, share: Share) -> int:
        """Notes that a sequence is in the step with its share, and returns the share's cost."""
        if share.layers is not None:
            self._ranges, self._spent = {sequence.id: share.layers}, {sequence.id: share.cost}
            self._parked = sequence
        return share.cost

    def costs(self, schedule: Schedule) -> Schedule:
        """Returns the schedule with the cost of each sequence instead of its tokens."""
        if not self._ranges:
            return schedule
        return {k: (s, self._spent.get(k, count)) for k, (s, count) in schedule.items()}

    def left(self, budget: int, schedule: Schedule) -> int:
        """Returns the part of a step's budget that the scheduled sequences leave."""
        costs = self.costs(schedule) if self._ranges else schedule
        return budget - sum([count for _, count in costs.values()])

    def parks(self, sequence: Sequence, count: int) -> bool:
        """Notes that a step has computed its share of a sequence, and returns whether the tokens
        still have layers to pass."""
        layers = self._ranges.get(sequence.id)
        if layers is None or layers.is_last:
            if sequence.num_parked_tokens:
                sequence.park(0, 0)
            return False
        sequence.park(count, layers.end)
        return True

    def give_up(self, schedule: Schedule) -> bool:
        """Makes scheduled sequences pass all layers at once, because their step has failed. Returns
        whether one of them was planned for some layers only."""
        had_ranges = bool(self._ranges)
        self._ranges, self._spent = {}, {}
        for sequence, _ in schedule.values():
            sequence.park(0, 0)
        return had_ranges

    def _advance(
        self, costs: LayeredCosts, sequence: Sequence, budget: int, num_rows: int
    ) -> Share:
        """Returns the next layers of the parked prompt. If the budget is too small for one layer,
        the prompt waits until the budgets so far add up to one."""
        count, first = sequence.num_parked_tokens, sequence.num_parked_layers
        found = self._layers(costs, first, count, budget, num_rows)
        if found is None:
            self._saved += costs.more(num_rows, budget) * costs.num_layers
            if self._saved < costs.more(num_rows, count):
                return Share(0, 0)
            found = Share(count, budget, LayerRange(first, first + 1, costs.num_layers))
        self._saved = 0.0
        return found

    def _layers(
        self, costs: LayeredCosts, first: int, count: int, budget: int, num_rows: int
    ) -> Share | None:
        """Returns the layers that `count` tokens can pass, equally many in each step; None if not
        even one."""
        allowed = costs.num_allowed(count, budget, num_rows)
        left = costs.num_layers - first
        if allowed == 0:
            return None
        taken = -(-left // -(-left // allowed))
        layers = LayerRange(first, first + taken, costs.num_layers)
        return Share(count, -(-budget * taken // max(allowed, taken)), layers)

    def _tokens_together(
        self, costs: LayeredCosts, sequence: Sequence, budget: int, num_rows: int
    ) -> int:
        """Returns how many tokens of a prompt pass the layers together; 0 if it is cut into
        chunks.
        """
        pending = sequence.num_pending_tokens
        chunked = costs.chunked(pending, budget, num_rows)
        most_cost = float("inf") if self._is_always else (1 - _LEAST_GAIN) * chunked
        if costs.least(pending, budget, num_rows) > most_cost:
            return 0
        best: _GroupOffer | None = None
        for group in _GROUPS:
            if group >= costs.num_layers:
                break
            most = min(self._most, costs.most_tokens(group, pending, budget, num_rows))
            if most <= budget:
                break  # larger groups take fewer tokens together
            for count in (most, -(-pending // -(-pending // most))):  # the last one small, or equal
                offer = _GroupOffer(count, costs.layered(pending, count, budget, num_rows))
                if best is None or offer.cost < best.cost:
                    best = offer
        return 0 if best is None or best.cost > most_cost else best.count
