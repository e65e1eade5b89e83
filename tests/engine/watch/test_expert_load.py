"""The live window of expert load: the steps that it counts, the counts, and the window's length."""

from __future__ import annotations

import threading

import numpy as np

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.routes.route_records import RouteRecord
from moe_serve.engine.watch.expert_load import WINDOW_S, ExpertLoad


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sequence(number: int) -> Sequence:
    request = GenerationRequest(
        request_id=f"r{number}", prompt_token_ids=(1,), params=SamplingParams()
    )
    return Sequence(number, request)


def record(number: int, ids: list[list[list[int]]]) -> RouteRecord:
    """Returns the routing of a step; `ids` is [N][L][K]."""
    return RouteRecord(
        request_id=f"r{number}",
        sequence_id=number,
        start=0,
        num_prompt_tokens=1,
        token_ids_N=np.zeros(len(ids), np.int32),
        expert_ids_NLK=np.array(ids, np.uint8),
        weights_NLK=None,
    )


def load_of(clock: Clock, num_layers: int = 2) -> ExpertLoad:
    return ExpertLoad(range(num_layers), 4, 2, interval_s=0.05, clock=clock)


def count(load: ExpertLoad, step: int, records: list[RouteRecord]) -> bool:
    """Counts a step of these sequences and returns True if it was counted."""
    wanted = load.wants(step, {r.sequence_id: sequence(r.sequence_id) for r in records})
    if wanted:
        load.take(records)
    return bool(wanted)


def test_rows_by_layer_and_expert() -> None:
    load = load_of(Clock())
    first = record(1, [[[0, 1], [2, 3]], [[0, 2], [2, 3]]])
    second = record(2, [[[0, 1], [2, 0]]])
    assert count(load, 0, [first, second])
    found = load.look()
    assert found.rows_LE.tolist() == [[3, 2, 1, 0], [1, 0, 3, 2]]
    assert (found.num_tokens, found.num_steps) == (3, 1)
    mean = found.activated_mean
    assert mean is not None and mean.tolist() == [3.0, 3.0]


def test_steps_are_counted_at_intervals_and_the_first_after_a_pause_always_is() -> None:
    clock = Clock()
    load, row = load_of(clock), [record(1, [[[0, 1], [2, 3]]])]
    assert count(load, 0, row)
    clock.now += 0.03
    assert not count(load, 1, row)
    clock.now += 0.03
    assert not count(load, 2, row), "one in four"
    assert count(load, 4, row)
    assert not count(load, 8, row), "they are too quick"
    clock.now += 0.5
    assert not count(load, 7, row)
    clock.now += 1.0
    assert count(load, 9, row), "after a pause"
    assert load.look().num_steps == 3


def test_engines_that_step_together_are_one_step() -> None:
    """Two attention ranks activate experts together, and each of them is asked twice."""
    clock = Clock()
    load = load_of(clock)
    assert load.wants(7, {1: sequence(1)})
    assert load.wants(7, {1: sequence(1)}), "asked again, it says the same"
    clock.now += 1.0
    assert load.wants(7, {2: sequence(2)}), "the same step, on the other rank"
    load.take([record(1, [[[0, 1], [2, 3]]])])
    assert load.look().num_steps == 0, "half of it is told"
    load.take([record(2, [[[0, 2], [2, 3]]])])
    found = load.look()
    assert found.num_steps == 1
    assert found.activated_L.tolist() == [3, 2]


def test_a_step_that_is_never_told_wholly_is_counted_as_far_as_it_was() -> None:
    clock = Clock()
    load = load_of(clock)
    for step in range(5):
        clock.now += 1.0
        load.wants(step, {1: sequence(1), 100 + step: sequence(100 + step)})
        load.take([record(1, [[[0, 1], [2, 3]]])])
    assert load.look().num_steps == 2, "three are still open"
    assert load.look().num_tokens == 2


def test_what_others_asked_for_is_left_out() -> None:
    load = load_of(Clock())
    load.take([record(1, [[[0, 1], [2, 3]]])])
    load.wants(0, {1: sequence(1)})
    load.take([record(1, [[[0, 1], [2, 3]]]), record(9, [[[3, 3], [3, 3]]])])
    assert load.look().rows_LE.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_choices_that_cannot_be_are_not_counted() -> None:
    """A rank of another model or a damaged message gives no error and no row."""
    load = load_of(Clock())
    assert count(load, 0, [record(1, [[[0, 1]]])])  # one layer, not two
    load = load_of(Clock())
    assert count(load, 0, [record(1, [[[0, 1], [2, 9]]])])  # expert 9 of 4
    assert load.look().num_tokens == 0


def test_the_window_forgets_and_the_total_does_not() -> None:
    clock = Clock()
    load, row = load_of(clock), [record(1, [[[0, 1], [2, 3]]])]
    for step in range(WINDOW_S + 30):
        clock.now += 1.0
        count(load, step, row)
    assert load.look().num_tokens == WINDOW_S
    assert load.total.num_tokens == WINDOW_S + 30
    clock.now += WINDOW_S
    found = load.look()
    assert found.num_tokens == 0 and found.activated_mean is None
    assert not found.rows_LE.any()


def test_others_may_look_while_it_counts() -> None:
    """A reader sees a row of every layer or of none, never a part."""
    load = ExpertLoad([1, 2], 4, 2, interval_s=0.0, stride=1)
    is_done, wrong = threading.Event(), []

    def look() -> None:
        while not is_done.is_set():
            for found in (load.look(), load.total):
                sums = found.rows_LE.sum(axis=1).tolist()
                if sums != [2 * found.num_tokens] * 2:
                    wrong.append(sums)

    watcher = threading.Thread(target=look)
    watcher.start()
    for step in range(300):
        count(load, step, [record(1, [[[0, 1], [2, 3]]])])
    is_done.set()
    watcher.join()
    assert not wrong
    assert load.total.num_tokens == 300
