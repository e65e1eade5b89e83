"""Slurm's host lists, expanded by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cluster.launch.hosts import expand_hostlist
from moe_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("node[01-03,7],login", "node01 node02 node03 node7 login"),
        ("a,b-[9-11]", "a b-9 b-10 b-11"),
        ("gpu[098-101].example", "gpu098.example gpu099.example gpu100.example gpu101.example"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("n[5]", "n5"),
    ],
)
def test_expand(text: str, hosts: str) -> None:
    assert expand_hostlist(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("a,,b", "a host name is empty"),
        ("a,", "a host name is empty"),
        ("a b", "spaces"),
        ("node[1-", "not closed"),
        ("node1]", "does not match"),
        ("node[[1]]", "does not match"),
        ("node[]", "not a list of numbers"),
        ("node[a-b]", "not a list of numbers"),
        ("node[3-1]", "runs backwards"),
        ("node[0-99999999999]", "too long"),
        ("n[0-60000]x[0-60000]", "more than"),
    ],
)
def test_a_wrong_list_is_refused_in_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        expand_hostlist(text)


@given(st.text(alphabet="n01-9,[] ", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ConfigError:
        return
    assert hosts and all(host and not set(host) & set("[], ") for host in hosts), hosts


@given(st.integers(0, 10_000), st.integers(0, 50), st.integers(1, 6))
def test_a_range_keeps_its_width(first: int, more: int, width: int) -> None:
    hosts = expand_hostlist(f"n[{first:0{width}d}-{first + more:0{width}d}]")
    assert [int(host[1:]) for host in hosts] == list(range(first, first + more + 1))
    assert all(len(host) == 1 + max(width, len(str(int(host[1:])))) for host in hosts), hosts
