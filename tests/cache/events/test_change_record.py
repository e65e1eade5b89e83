"""What subscribers are told is the difference between two states, however many changes lie
between."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cache.events.change_record import BASE_MODEL, ChangeRecord, PublishedPage, update
from moe_serve.cache.page_key import token_array

_TOKENS = token_array([1])


@given(st.lists(st.sampled_from(["store", "remove", "take", "clear"]), max_size=80), st.randoms())
def test_taken_changes_lead_to_the_same_pages(steps: list[str], rng: object) -> None:
    """A page is stored behind a page that is there, and only a leaf is removed. Stored again, it
    has the same key."""
    pick = rng.choice  # type: ignore[attr-defined]
    wakes: list[int] = []
    record = ChangeRecord(lambda: wakes.append(1), lambda: None)
    now: dict[bytes, bytes | None] = {}  # key -> parent
    told: dict[bytes, PublishedPage] = {}
    for step in [*steps, "take"]:
        leaves = sorted(set(now) - set(now.values()))
        if step == "store":
            parent = pick([None, *sorted(now)])
            key = (parent or b"") + pick([b"a", b"b"])
            if key not in now:
                now[key] = parent
                record.stored(PublishedPage(key, parent, _TOKENS, BASE_MODEL))
        elif step == "remove" and leaves:
            key = pick(leaves)
            del now[key]
            record.removed(key)
        elif step == "clear":
            now = {}
            record.cleared()
        elif step == "take":
            changes = record.take()
            if changes is None:
                assert told.keys() == now.keys(), "nothing to take although something changed"
                continue
            for removed in changes.removed:  # as a subscriber drops them
                leaf = told.pop(removed)
                assert leaf.key not in {page.parent_key for page in told.values()}
            update(told, replace(changes, removed=()))
            assert {key: page.parent_key for key, page in told.items()} == now
            order = list(told)
            for key, page in told.items():
                assert page.parent_key is None or order.index(page.parent_key) < order.index(key)
            wakes.clear()
            record.step_ended()
            assert not wakes and record.take() is None, "nothing is told twice"
