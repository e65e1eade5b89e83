"""Which rank runs on which node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cluster.control.rank_name import RankName, all_ranks
from moe_serve.cluster.launch.node_layout import (
    NodeLayout,
    explicit_layout,
    share_out,
)
from moe_serve.errors import ConfigError


def shown(layout: NodeLayout) -> str:
    """2 attention and 3 expert ranks on 2 nodes: a0 a1 e0 | e1 e2."""
    return " | ".join(
        " ".join(f"{rank.role[0]}{rank.index}" for rank in ranks) for ranks in layout.nodes
    )


def ranks(text: str) -> list[RankName]:
    names = {"a": "attention", "e": "expert"}
    return [RankName(names[word[0]], int(word[1:])) for word in text.split()]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attention", "expert", "num_nodes", "expected"),
    [
        (1, 1, 1, "a0 e0"),
        (1, 1, 2, "a0 | e0"),
        (2, 3, 2, "a0 a1 e0 | e1 e2"),
        (1, 4, 3, "a0 e0 | e1 e2 | e3"),
        (5, 1, 2, "a0 a1 a2 | a3 a4 e0"),
    ],
)
def test_nodes_are_filled_evenly(
    attention: int, expert: int, num_nodes: int, expected: str
) -> None:
    assert shown(share_out(all_ranks(attention, expert), num_nodes)) == expected


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
def test_every_rank_has_one_node(attention: int, expert: int, num_nodes: int) -> None:
    if num_nodes > attention + expert:
        with pytest.raises(ConfigError, match="without any; use fewer nodes"):
            share_out(all_ranks(attention, expert), num_nodes)
        return
    layout = share_out(all_ranks(attention, expert), num_nodes)
    flat = [rank for ranks in layout.nodes for rank in ranks]
    assert flat == all_ranks(attention, expert), "in rank order, attention first"
    sizes = [len(ranks) for ranks in layout.nodes]
    assert max(sizes) - min(sizes) <= 1, sizes
    assert layout.num_ranks("attention") == attention and layout.num_ranks("expert") == expert
    for rank in flat:
        assert layout.nodes[layout.node_of(rank)][layout.place_on_node(rank)] == rank


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (["a0 e0", "e0"], "expert-0 is placed 2 times"),
        (["a0", "a1"], "no expert rank"),
        (["e0"], "no attention rank"),
        (["a0 e0", "e2"], "expert-1 is placed nowhere"),
        (["a0 e0", ""], "node 1 has no rank"),
    ],
)
def test_a_wrong_layout_is_refused(nodes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explicit_layout([ranks(text) for text in nodes], "here")


def test_a_layout_in_words() -> None:
    layout = explicit_layout([ranks("a0 a1 a2 e1"), ranks("e0 e2")], "here")
    assert layout.describe(0) == "attention 0-2, expert 1"
    assert layout.describe(1) == "expert 0, 2"
