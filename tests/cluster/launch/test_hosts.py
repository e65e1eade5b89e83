"""Lists of hosts: hostfiles, and the compressed lists of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.cluster.launch.hosts import (
    check_slots,
    expand_hostlist,
    parse_hostfile,
    read_hostfile,
)
from moe_serve.errors import ConfigError


def test_hosts_slots_and_comments() -> None:
    text = "# all\nworker-1 slots=4\n\nme@worker-2   slots = 8  # the large one\nworker-3\n"
    hosts = parse_hostfile(text, "hosts")
    assert [(host.name, host.slots) for host in hosts] == [
        ("worker-1", 4),
        ("me@worker-2", 8),
        ("worker-3", None),
    ]
    assert hosts[1].address == "worker-2"
    check_slots(hosts, [4, 8, 100])
    with pytest.raises(ConfigError, match="worker-1 would get 5 ranks and has 4 slots"):
        check_slots(hosts, [5, 1, 1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# none\n", "names no host"),
        ("a slots=x", "'a slots=x' .hosts:1. is not a hostfile line"),
        ("a\nb cpus=3", "hosts:2"),
        ("a\na slots=2", "a is in the hostfile twice"),
        ("a slots=0", "a has no slots"),
        ("-oProxyCommand=x", "is not a hostfile line"),
        ("-v", "is not a hostfile line"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hostfile(text, "hosts")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "none")


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
