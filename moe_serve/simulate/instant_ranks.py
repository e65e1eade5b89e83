"""The coordinator of a simulated cluster, whose attention and expert ranks compute nothing.

`ClusterEngine` drives it as it drives processes: the same routing of requests to ranks, the same
choice of micro-batches, the same steps sent out ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_serve.cluster.control.messages import (
    QueryPages,
    Slice,
    StageSeconds,
    StepDone,
    StepServed,
)
from moe_serve.cluster.control.rank_name import all_ranks
from moe_serve.cluster.members.pool_watch import PoolWatch
from moe_serve.cluster.members.roster import RankPhase, Roster
from moe_serve.cluster.steps.epoch_maker import Epoch
from moe_serve.cluster.steps.step_in_flight import RankWork, StepInFlight
from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepCosts
from moe_serve.pipeline.costs.step_seconds import LayerTimes, step_seconds
from moe_serve.simulate.instant_executor import Scatter
from moe_serve.simulate.step_ends import OwnMachines, StepEnds
from moe_serve.simulate.virtual_clock import VirtualClock, answers

WholeSeconds = Callable[[Sequence[BatchLoad]], float]  # of a step, from the ranks' loads

_NO_LOAD = BatchLoad.decode(0, 0)


@dataclass(frozen=True, slots=True)
class StepPlace:
    """The machine on which a cell's steps run, and the cell's number on it."""

    ends: StepEnds
    cell: int


class InstantMembers:
    """Implements Members: ranks that are never lost."""

    def __init__(self, roster: Roster) -> None:
        self.on_event: Callable[[], None] = lambda: None
        self.roster, self.num_lost, self.last_loss = roster, 0, ""


class InstantCoordinator:
    """Implements StepCoordinator. A step's tokens are known when it is sent out; `collect` moves
    the clock to its end."""

    def __init__(
        self,
        clock: VirtualClock,
        costs: StepCosts,
        ranks: Ranks,
        watch: PoolWatch,
        *,
        whole: WholeSeconds | None = None,
        scatter: Scatter | None = None,
        place: StepPlace | None = None,
    ) -> None:
        """`whole`: predicts whole steps, in place of their stages; then `scatter` draws how long
        they take beside what is predicted. `place`: where the steps run; None: on a machine of
        their own."""
        names = all_ranks(ranks.num_attention, ranks.num_experts)
        roster = Roster(names)
        for state in roster.all():
            state.phase, state.num_starts = RankPhase.SERVING, 1
        attention, experts = (
            tuple(str(n) for n in names if n.role == role) for role in ("attention", "expert")
        )
        self.membership, self.has_events, self.outage_s = InstantMembers(roster), False, 0.0
        self.epoch = Epoch(1, attention, experts, dict.fromkeys(attention, 1))
        self._clock, self._costs, self._ranks, self._watch = clock, costs, ranks, watch
        self._whole, self._scatter = whole, scatter or Scatter()
        self._place = place or StepPlace(OwnMachines(), 0)
        self._numbers = itertools.count(1)
        self._begun: dict[int, StepServed] = {}  # step -> what its expert ranks report

    @property
    def step_end(self) -> float | None:
        """The end of the step that runs now; None if no step was sent out. Later steps of other
        cells may still delay it."""
        return self._place.ends.next_end(self._place.cell)

    @property
    def last_end(self) -> float | None:
        """The end of the last step that was sent out; None if there was no step."""
        return self._place.ends.last_end(self._place.cell)

    def stop(self) -> None:
        """Does nothing, as no step waits."""

    def is_in(self, name: str, start: int) -> bool:
        return name in self.epoch.starts

    def settle(self, *, is_patient: bool) -> bool:
        """Returns True: all ranks are there."""
        return True

    def look(self) -> bool:
        """Returns True: all ranks are there."""
        return True

    def launch(self, works: Mapping[str, RankWork], *, can_wait: bool = True) -> StepInFlight:
        return self._sent(works, self._clock.now)

    def can_follow(self, flight: StepInFlight) -> bool:
        return True

    def launch_after(self, flight: StepInFlight, works: Mapping[str, RankWork]) -> StepInFlight:
        after = {name: replace(work, after=flight.step) for name, work in works.items()}
        start = self.step_end
        assert start is not None, f"step {flight.step} runs"
        return self._sent(after, start)

    def collect(self, flight: StepInFlight) -> dict[str, StepDone | Exception]:
        """Moves the clock to the step's end, and reports on it as the ranks would."""
        served = self._begun.pop(flight.step)
        begin, end = self._place.ends.take(self._place.cell)
        self._clock.advance_to(end)
        for name, result in flight.results.items():
            assert isinstance(result, StepDone), f"{name} cannot fail"
            self._watch.heard(name, result, 0)
        for name in self.epoch.experts:
            self._watch.heard(name, served, 0)
        self._watch.ended(flight.step, end - begin, True)
        return {name: flight.results[name] for name in flight.works}

    def run(self, works: Mapping[str, RankWork]) -> dict[str, StepDone | Exception]:
        return self.collect(self.launch(works))

    def query_pages(self, name: str, start: int, order: QueryPages) -> list[bool]:
        return [True] * len(order.pages)

    def _sent(self, works: Mapping[str, RankWork], start: float) -> StepInFlight:
        step = next(self._numbers)
        self._watch.began(step)
        seconds, attention, experts = self._cost([batch_loads(work) for work in works.values()])
        served = StepServed(epoch=1, step=step, failure=None, seconds=experts)
        self._begun[step] = served
        self._place.ends.put(self._place.cell, seconds, self._clock.now)
        results: dict[str, StepDone | Exception] = {
            name: _done(step, itertools.chain.from_iterable(work.micro_batches), attention)
            for name, work in works.items()
        }
        return StepInFlight(step, self.epoch.number, dict(works), start, set(), results)

    def _cost(
        self, loads: Sequence[Sequence[BatchLoad]]
    ) -> tuple[float, StageSeconds, StageSeconds]:
        """Predicts a step from the loads of all ranks' micro-batches: its seconds, and those of the
        attention and the expert ranks."""
        together = [BatchLoad.together(parts) for parts in loads]
        if self._whole is not None:
            seconds = self._whole(together) * self._scatter.draw()
            return seconds, StageSeconds(seconds, 0.0, seconds), StageSeconds(0.0, 0.0, seconds)
        num_parts = max(len(parts) for parts in loads)
        padded = [(*parts, *(_NO_LOAD,) * (num_parts - len(parts))) for parts in loads]
        times = self._costs.layer_times(list(zip(*padded, strict=True)), self._ranks)
        seconds = step_seconds(times) + self._costs.fixed_seconds(together)
        return seconds, *_stage_seconds(times, seconds)


def _stage_seconds(
    times: Sequence[LayerTimes], seconds: float
) -> tuple[StageSeconds, StageSeconds]:
    """Returns how long the attention ranks and the expert ranks computed and waited in a step."""
    attention_s = sum(t.num_layers * sum(t.attention_s) for t in times)
    experts_s = sum(t.num_layers * sum(t.experts_s) for t in times)
    layers_s = step_seconds(times)
    return (
        StageSeconds(attention_s, max(0.0, layers_s - attention_s), seconds),
        StageSeconds(experts_s, max(0.0, layers_s - experts_s), seconds),
    )


def batch_loads(work: RankWork) -> list[BatchLoad]:
    """Returns the load of each micro-batch of a rank's work."""
    return [
        BatchLoad.of_parts([s.start for s in batch], [s.count for s in batch])
        for batch in work.micro_batches
    ]


def _done(step: int, slices: Iterable[Slice], seconds: StageSeconds) -> StepDone:
    return StepDone(
        epoch=1,
        step=step,
        sampled=answers((piece.sequence_id, piece.num_logits) for piece in slices),
        failures={},
        prompt_logprobs={},
        seconds=seconds,
    )
