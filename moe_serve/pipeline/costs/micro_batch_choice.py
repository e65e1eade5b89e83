"""Chooses the number of micro-batches of a step.

More than one keeps both pools busy, but two half batches activate more experts than a whole one,
multiply smaller matrices and send more messages. So the step's time is predicted for 1 to 4
micro-batches from the cost model (calibrated, or measured while running) and corrected by earlier
measurements of the same choice. The shortest is taken; at a tie, the fewest micro-batches.

A choice never changes tokens, so one that looks nearly as good may be tried: a few times when a
batch size is new, then after 16 steps, 32, and so on up to every 256. Machines have slower and
faster seconds, and a choice measured in a slow one looks worse than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_serve.pipeline.costs.step_costs import BatchLoad, Ranks, StepCosts, StepTiming, step_time

MAX_MICRO_BATCHES = 4
Reason = Literal["one sequence", "not measured yet", "trying out", "predicted best"]

_TIE = 1.03  # fewer micro-batches are as good within this factor: estimates scatter by more
# A choice is tried if its estimate is below the best one times this factor, listed by how often it
# was measured. An unmeasured choice is tried unless it looks hopeless: one slow step costs less
# than a wrong estimate that is never corrected.
_WORTH_TRYING = (4.0, 2.0, 1.25)
_WORTH_CHECKING = 1.25  # the same factor for a choice that was measured
_NUM_TRIALS = len(_WORTH_TRYING)
_FIRST_CHECK, _LAST_CHECK = 16, 256  # steps since the last measurement; each check doubles them
_WEIGHT = 0.2  # weight of a new measurement in a correction
_CHECK_WEIGHT = 0.5  # the same for a measurement after a pause
_MOST_SLOWER = 1.1  # a new measurement counts as at most this times the estimate
_MAX_PLANS = 4096


@dataclass(frozen=True, slots=True)
class MicroBatchChoice:
    """The chosen number of micro-batches.

    `seconds[m - 1]`: the predicted time of a step with m micro-batches; empty if nothing was
    predicted.
    """

    num_micro_batches: int
    seconds: tuple[float, ...]
    reason: Reason

    def explain(self) -> str:
        """Describes the choice for logs: `m = 2: predicted best (1: 3.10 ms, 2: 2.05 ms)`."""
        times = ", ".join(f"{m}: {1e3 * s:.2f} ms" for m, s in enumerate(self.seconds, 1))
        return f"m = {self.num_micro_batches}: {self.reason}" + (f" ({times})" if times else "")


@dataclass(slots=True)
class _Measured:
    """Measured time of one choice: `seconds` for `loads`, averaged over `count` measurements."""

    loads: tuple[BatchLoad, ...]
    seconds: float
    count: int = 1


class _Record:
    """Measured times of the choices at about one batch size.

    They are kept as seconds, not as ratios to a prediction: predictions made from running steps
    change, above all while few measurements exist.
    """

    def __init__(self, predict: Callable[[Sequence[BatchLoad]], tuple[float, ...]]) -> None:
        self._predict = predict
        self._measured: list[_Measured | None] = [None] * MAX_MICRO_BATCHES
        self._steps_to_check = [_FIRST_CHECK] * MAX_MICRO_BATCHES
        self._measured_at = [0] * MAX_MICRO_BATCHES
        self.num_steps = 0

    def count(self, index: int) -> int:
        """Returns how often a choice was measured."""
        measured = self._measured[index]
        return 0 if measured is None else measured.count

    def corrected(self, predicted: tuple[float, ...]) -> tuple[float, ...]:
        """Corrects predictions by the measurements. Unmeasured choices get the mean correction of
        the others.
        """
        ratios = [
            None if each is None else each.seconds / self._predict(each.loads)[index]
            for index, each in enumerate(self._measured[: len(predicted)])
        ]
        known = [ratio for ratio in ratios if ratio is not None]
        usual = sum(known) / len(known) if known else 1.0
        return tuple(
            [
                seconds * (usual if ratio is None else ratio)
                for seconds, ratio in zip(predicted, ratios, strict=True)
            ]
        )

    def observe(self, index: int, loads: Sequence[BatchLoad], seconds: float) -> None:
        """Adds a measurement.

        Pauses of the machine only ever make a step slower, and the first step of a new size does
        one-time work. So the faster trial counts, and one slow step moves an estimate by 2%.
        Otherwise a single pause would turn the best choice away for many steps.
        """
        old = self._measured[index]
        if old is None:
            self._measured[index] = _Measured(tuple(loads), seconds)
            return
        scale = self._predict(loads)[index] / self._predict(old.loads)[index]
        expected_s = old.seconds * scale  # scaled to these loads
        if old.count >= _NUM_TRIALS:
            is_old = self.num_steps - self._measured_at[index] >= _FIRST_CHECK
            seconds = min(max(seconds, expected_s / 2), expected_s * _MOST_SLOWER)
            seconds = expected_s + (_CHECK_WEIGHT if is_old else _WEIGHT) * (seconds - expected_s)
        else:
            seconds = min(expected_s, seconds)
        self._measured[index] = _Measured(tuple(loads), seconds, old.count + 1)
        self._measured_at[index] = self.num_steps

    def to_try(self, seconds: tuple[float, ...], best: int) -> int | None:
        """Returns the index of a choice that should be measured now, or None."""
        for index, estimate in enumerate(seconds):
            count = self.count(index)
            if count < _NUM_TRIALS and estimate <= seconds[best] * _WORTH_TRYING[count]:
                return index
        self._steps_to_check[best] = _FIRST_CHECK
        limit = seconds[best] * _WORTH_CHECKING
        for index, estimate in enumerate(seconds):
            age = self.num_steps - self._measured_at[index]
            if index != best and estimate <= limit and age >= self._steps_to_check[index]:
                self._steps_to_check[index] = min(2 * self._steps_to_check[index], _LAST_CHECK)
                return index
        return None


class MicroBatchChooser:
    """Chooses the number of micro-batches for one layout. Its costs learn from the steps."""

    def __init__(
        self,
        costs: StepCosts,
        ranks: Ranks,
        max_micro_batches: int = MAX_MICRO_BATCHES,
    ) -> None:
        assert 1 <= max_micro_batches <= MAX_MICRO_BATCHES, f"{max_micro_batches} micro-batches"
        self._costs, self._ranks, self._max = costs, ranks, max_micro_batches
        self._version = 0
        self._plans: dict[tuple[int, ...], tuple[float, ...]] = {}
        self._records: dict[tuple[int, bool], _Record] = {}

    def choose(self, loads: Sequence[BatchLoad]) -> MicroBatchChoice:
        """Chooses for a step. `loads`: one for each attention rank that takes part in it."""
        limit = min(self._max, max(load.num_sequences for load in loads))
        if limit <= 1:
            return MicroBatchChoice(1, (), "one sequence")
        if not self._costs.is_ready:
            return MicroBatchChoice(1, (), "not measured yet")
        record = self._record(loads)
        seconds = record.corrected(self._predicted(loads))[:limit]
        shortest = min(seconds) * _TIE
        best = next(i for i, estimate in enumerate(seconds) if estimate <= shortest)
        record.num_steps += 1
        trial = record.to_try(seconds, best)
        if trial is not None and trial != best:
            return MicroBatchChoice(trial + 1, seconds, "trying out")
        return MicroBatchChoice(best + 1, seconds, "predicted best")

    def observe(
        self, loads: Sequence[BatchLoad], choice: MicroBatchChoice, timing: StepTiming
    ) -> None:
        """Records a finished step. Do not call it for steps that were repeated or failed."""
        # first, so that these loads can be predicted below
        self._costs.observe(loads, choice.num_micro_batches, timing)
        if choice.seconds:
            index = choice.num_micro_batches - 1
            self._record(loads).observe(index, loads, timing.seconds)

    def _predicted(self, loads: Sequence[BatchLoad]) -> tuple[float, ...]:
        """Predicts seconds by m - 1; cached by the first four bits of the loads."""
        if self._costs.version != self._version:
            self._version = self._costs.version
            self._plans.clear()
        key = tuple([_rounded(number) for load in loads for number in _numbers(load)])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._predict(loads)
        return plan

    def _predict(self, loads: Sequence[BatchLoad]) -> tuple[float, ...]:
        choices = range(1, self._max + 1)
        return tuple([step_time(self._costs, loads, num, self._ranks) for num in choices])

    def _record(self, loads: Sequence[BatchLoad]) -> _Record:
        """Returns the record for the size, to within a factor of two, and for whether the step has
        prefill.
        """
        num_rows = sum([load.num_rows for load in loads])
        has_prefill = max([load.num_largest for load in loads]) > 1
        key = (num_rows.bit_length(), has_prefill)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = _Record(self._predicted)
        return record


def _numbers(load: BatchLoad) -> tuple[int, ...]:
    return (load.num_rows, load.num_sequences, load.num_kv_tokens, load.num_pairs, load.num_largest)


def _rounded(number: int) -> int:
    """Rounds to four significant bits."""
    shift = number.bit_length() - 4
    return number >> shift << shift if shift > 0 else number
