"""DeepSpeed's hostfile."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.cluster.launch.hosts import check_slots, parse_hostfile, read_hostfile
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
