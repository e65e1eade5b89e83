"""The order in which waiting sequences may start: by urgency, then by arrival, with a bound."""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.engine.request.request import GenerationRequest
from moe_serve.engine.request.sampling_params import SamplingParams
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.schedule.urgency import Urgency
from moe_serve.engine.schedule.waiting_queue import WaitingQueue


def waiting(key: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    request = GenerationRequest(
        request_id=f"r{key}",
        prompt_token_ids=(1,),
        params=SamplingParams(),
        priority=priority,
        arrival_time=arrival,
    )
    return Sequence(key, request)


def line_of(*sequences: Sequence, clock: Callable[[], float] = lambda: 0.0) -> WaitingQueue:
    line = WaitingQueue(Urgency(5.0), clock)
    for sequence in sequences:
        line.add(sequence)
    line.check_integrity()
    return line


def ids_of(line: WaitingQueue) -> list[list[int]]:
    return [[sequence.id for sequence in group] for group in line.groups()]


def test_the_most_urgent_come_first_and_ties_by_arrival() -> None:
    line = line_of(*(waiting(key, level) for key, level in enumerate((3, 0, -2, 3, 0, -2))))
    assert ids_of(line) == [[2, 5], [1, 4], [0, 3]]
    assert [sequence.id for sequence in line] == [0, 1, 2, 3, 4, 5], "the line is not changed"


def test_with_one_priority_it_is_the_line_itself() -> None:
    """The queue itself is returned, unchanged by ages and preemptions."""
    now = [0.0]
    line = line_of(*(waiting(key, 7, float(key)) for key in range(4)), clock=lambda: now[0])
    line.put_back(waiting(9, 7, 3.5))
    for now[0] in (0.0, 6.0, 100.0):
        (group,) = line.groups()
        assert group is line.line
        assert [sequence.id for sequence in group] == [9, 0, 1, 2, 3]


def test_nobody_waits_is_no_trouble() -> None:
    line = line_of()
    assert len(line) == 0 and sum(ids_of(line), []) == []


def test_each_step_of_waiting_is_worth_one_of_priority() -> None:
    now = [4.9]
    line = line_of(waiting(0, 2), waiting(1, 0, 1.0), waiting(2, 1, 2.0), clock=lambda: now[0])
    assert ids_of(line) == [[1], [2], [0]]
    now[0] = 5.0
    assert ids_of(line) == [[1], [0, 2]], "0 came before 2"
    now[0] = 10.0
    line.add(waiting(3, 0, 10.0))
    assert ids_of(line) == [[1], [0, 2, 3]]
    now[0] = 11.0
    line.add(waiting(4, -8, 11.0))
    assert ids_of(line) == [[4], [1], [0, 2, 3]], "eight steps of waiting are worth as much"


def test_an_urgent_flow_is_overtaken_by_who_waits() -> None:
    """Priority 0 comes every second; 3 waits from the beginning and starts after 15 s at most."""
    now = [0.0]
    line = line_of(waiting(0, 3), clock=lambda: now[0])
    for key in range(1, 30):
        now[0] = float(key)
        line.add(waiting(key, 0, now[0]))
        first = next(iter(line.groups()))[0]
        line.remove(first)
        if first.id == 0:
            break
    assert now[0] == 15.0


def test_where_waiting_is_worth_everything_the_order_is_that_of_arrival() -> None:
    line = WaitingQueue(Urgency(0.0), lambda: 0.0)
    for key, level in enumerate((3, -2, 0)):
        line.add(waiting(key, level))
    assert ids_of(line) == [[0, 1, 2]]


def test_who_is_put_back_is_first_of_its_kind_and_waits_from_then_on() -> None:
    now = [60.0]
    line = line_of(waiting(0, 2, 58.0), waiting(1, 1, 58.0), clock=lambda: now[0])
    line.put_back(waiting(2, 2, 1.0))
    line.put_back(waiting(3, 2, 1.0))
    assert ids_of(line) == [[1], [3, 2, 0]]
    now[0] = 63.0
    assert ids_of(line) == [[1], [0], [3, 2]]
    now[0] = 65.0
    assert ids_of(line) == [[1], [3, 2, 0]]


def test_who_leaves_is_counted_no_more() -> None:
    kept, gone = waiting(0), waiting(1, 5)
    line = line_of(kept, gone)
    line.remove(gone)
    line.check_integrity()
    (group,) = line.groups()
    assert group is line.line and list(group) == [kept]
