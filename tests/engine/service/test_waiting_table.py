"""Columns of waiting requests: what is added is found, in whatever order it is removed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.clock import REAL_CLOCK
from moe_serve.engine.request.sequence import Sequence
from moe_serve.engine.request.standing import Standing
from moe_serve.engine.service.waiting_table import WaitingTable
from tests.support.engine.timed_engine import TIERS, request, service_of


def sequence_of(key: int) -> Sequence:
    made = Sequence(
        key, request(f"r{key}", service_of(TIERS[key % 3]), token=1 + key, num_prompt=2)
    )
    made.standing = Standing(
        queued_s=float(key),
        deadline_s=key + 1.0,
        clock=REAL_CLOCK,
        tier=key % 3,
        tenant=key % 5,
        num_left=key,
    )
    made.num_preemptions = int(key % 7 == 0)
    return made


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=400))
def test_rows_follow_the_sequences(steps: list[tuple[bool, int]]) -> None:
    table, held = WaitingTable(), dict[int, Sequence]()
    for is_added, key in steps:
        if is_added and key not in held:
            held[key] = sequence_of(key)
            table.add(held[key])
        elif not is_added and key in held:
            table.remove(held.pop(key))
    table.check_integrity(held.values())
    assert len(table) == len(held)
    for row, sequence in enumerate(table.sequences):
        key = sequence.id
        assert table.queued[row] == key and table.num_left[row] == key
        assert table.tier[row] == key % 3 and table.tenant[row] == key % 5
        assert table.is_preempted[row] == (key % 7 == 0)
