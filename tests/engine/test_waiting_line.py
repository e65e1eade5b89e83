"""In which order those who wait may start: by urgency, by arrival, and nobody for ever."""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.engine.request import GenerationRequest
from moe_serve.engine.sampling_params import SamplingParams
from moe_serve.engine.sequence import Sequence
from moe_serve.engine.waiting_line import WaitingLine


def waiting(key: int, priority: int = 0, arrival: float = 0.0) -> Sequence:
    request = GenerationRequest(
        request_id=f"r{key}",
        prompt_token_ids=(1,),
        params=SamplingParams(),
        priority=priority,
        arrival_time=arrival,
    )
    return Sequence(key, request)


def line_of(*sequences: Sequence, clock: Callable[[], float] = lambda: 0.0) -> WaitingLine:
    line = WaitingLine(5.0, clock)
    for sequence in sequences:
        line.add(sequence)
    line.check_integrity()
    return line


def ids_of(line: WaitingLine) -> list[list[int]]:
    return [[sequence.id for sequence in group] for group in line.groups()]


def test_the_most_urgent_come_first_and_ties_by_arrival() -> None:
    line = line_of(*(waiting(key, level) for key, level in enumerate((3, 0, -2, 3, 0, -2))))
    assert ids_of(line) == [[2, 5], [1, 4], [0, 3]]
    assert [sequence.id for sequence in line] == [0, 1, 2, 3, 4, 5], "the line is not changed"


def test_with_one_priority_it_is_the_line_itself() -> None:
    """Nothing is looked at or copied: neither ages nor who was put back change the order."""
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


def test_whoever_waited_for_long_counts_as_most_urgent() -> None:
    now = [4.9]
    line = line_of(waiting(0, 9), waiting(1, 0, 1.0), waiting(2, 4, 2.0), clock=lambda: now[0])
    assert ids_of(line) == [[1], [2], [0]]
    now[0] = 5.0
    assert ids_of(line) == [[0, 1], [2]], "and came before 1"
    line.add(waiting(3, -8, 5.0))
    assert ids_of(line) == [[0, 3], [1], [2]], "also before somebody far more urgent"
    now[0] = 7.0
    assert ids_of(line) == [[0, 1, 2, 3]], "where all but the last wait for long, by arrival"


def test_who_is_put_back_is_first_of_its_kind_and_waits_from_then_on() -> None:
    now = [60.0]
    line = line_of(waiting(0, 2, 58.0), waiting(1, 1, 58.0), clock=lambda: now[0])
    line.put_back(waiting(2, 2, 1.0))
    line.put_back(waiting(3, 2, 1.0))
    assert ids_of(line) == [[1], [3, 2, 0]]
    now[0] = 63.0
    assert ids_of(line) == [[0, 1], [3, 2]]
    now[0] = 65.0
    assert ids_of(line) == [[3, 2, 0, 1]]


def test_who_leaves_is_counted_no_more() -> None:
    kept, gone = waiting(0), waiting(1, 5)
    line = line_of(kept, gone)
    line.remove(gone)
    line.check_integrity()
    (group,) = line.groups()
    assert group is line.line and list(group) == [kept]
