"""Cluster files: the examples, what is refused, and how a node finds itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.cluster.launch.cluster_file import (
    ClusterFile,
    find_node,
    parse_cluster_file,
    read_cluster_file,
)
from moe_serve.cluster.launch.environment import NodeFlags
from moe_serve.config.keys import config_keys
from moe_serve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "configs" / "clusters").glob("*.yaml"))
SMALL = """\
name: pair
coordinator: {host: 10.0.0.1, port: 7000}
nodes:
  - {name: a, address: 10.0.0.1, attention_ranks: [0]}
  - {name: b, address: 10.0.0.2, expert_ranks: [0]}
"""


def small() -> ClusterFile:
    return parse_cluster_file(SMALL, "pair.yaml")


def rank_of(hostname: str, *addresses: str, environ: dict[str, str] | None = None) -> int:
    node = find_node(small(), environ or {}, hostname, frozenset(addresses), NodeFlags())
    assert (node.num_nodes, str(node.coordinator)) == (2, "10.0.0.1:7000")
    return node.node_rank


def test_there_are_examples_for_two_and_eight_nodes() -> None:
    assert {len(read_cluster_file(path).nodes) for path in EXAMPLES} == {2, 8}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(path: Path) -> None:
    cluster = read_cluster_file(path)
    assert cluster.name == path.stem
    assert cluster.coordinator.host == cluster.nodes[0].address, "node 0 coordinates"
    assert cluster.layout.num_nodes == len(cluster.nodes)
    keys = {key.path: key for key in config_keys()}
    for name, value in cluster.settings.items():
        keys[name].check(value, str(path))


def test_a_node_finds_itself_by_name_or_address() -> None:
    assert rank_of("a") == 0
    assert rank_of("b.example.org") == 1
    assert rank_of("elsewhere", "127.0.0.1", "10.0.0.2") == 1


def test_a_node_finds_itself_by_its_launcher() -> None:
    environ = {"LWS_LEADER_ADDRESS": "x", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    assert rank_of("pod", environ=environ) == 1
    with pytest.raises(ConfigError, match="leader-worker-set. has 3 nodes, but the cluster pair"):
        rank_of("pod", environ=environ | {"LWS_GROUP_SIZE": "3"})


def test_a_stranger_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"stranger is not a node of the .* a \(10.0.0.1\)"):
        rank_of("stranger")
    with pytest.raises(ConfigError, match="this host is both a and b of the cluster pair"):
        rank_of("a", "10.0.0.2")


def test_flags_win_over_the_file() -> None:
    node = find_node(small(), {}, "a", frozenset(), NodeFlags(node_rank=1))
    assert node.node_rank == 1
    with pytest.raises(ConfigError, match="--num-nodes is 3, but the cluster pair has 2"):
        find_node(small(), {}, "a", frozenset(), NodeFlags(num_nodes=3))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: pair\n", "", "missing required field `name`"),
        ("name: pair", "name: pair\nnam: x", "unknown field `nam`"),
        ("port: 7000", "prot: 7000", "unknown field `prot` - at `\\$.coordinator`"),
        ("port: 7000", "port: 70000", "coordinator.port is 70000"),
        ("port: 7000", "port: x", "`\\$.coordinator.port` .pair.yaml:2: 'x'"),
        ("port: 7000", "port: 1:30", "`\\$.coordinator.port` .pair.yaml:2: '1:30'"),
        ("expert_ranks: [0]", "expert_ranks: [00]", "pair.yaml:5: '00'"),
        ("name: pair", "name: !!binary aGk=", "not a plain value .pair.yaml:1.: it has the tag"),
        ("name: b", "name: a", "each node needs its own name: \\['a'\\]"),
        ("10.0.0.2", "10.0.0.1", "each node needs its own address"),
        ("expert_ranks: [0]", "expert_ranks: [1]", "expert-0 is placed nowhere"),
        ("expert_ranks: [0]", "expert_ranks: [-1]", "negative"),
        ("expert_ranks: [0]", "expert_ranks: [0, 1], devices: [0]", "2 ranks and 1 devices"),
        ("expert_ranks: [0]", "expert_ranks: [0], expert_ranks: [1]", "set twice .pair.yaml:5"),
        ("name: pair", "name: pair\nserve: {server: {api_keys: [k]}}", "write @FILE"),
        ("name: pair", "name: pair\nserve: {server: {api_keys: k}}", "server.api_keys holds a key"),
        ("name: pair", "name: pair\nserve: {server: {admin_keys: ['@f', k]}}", "server.admin_keys"),
        ("name: pair", "name: pair\nserve: {server: 1}", "serve"),
        ("name: pair", "name: [", "is not valid YAML"),
        ("name: pair", "name: &a [*a]", "that contains it .pair.yaml:1"),
        ("name: pair", "name: " + "[" * 3000, "nested too deeply"),
        (SMALL, "name: pair\ncoordinator: {host: h}\nnodes: []", "has no node"),
        (SMALL, "3", "Expected `object`"),
        (SMALL, "", "Expected `object`"),
    ],
)
def test_a_wrong_file_is_refused(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=message):
        parse_cluster_file(SMALL.replace(old, new), "pair.yaml")


def test_aliases_of_aliases() -> None:
    """A few lines that are 2^18 numbers; and what an alias is good for is read as ever."""
    lines = [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 18)]
    text = "\n".join(["a0: &a0 [1, 1]", *lines, SMALL])
    with pytest.raises(ConfigError, match=r"aliases of pair.yaml repeat [\d,]+ values"):
        parse_cluster_file(text, "pair.yaml")
    again = SMALL.replace("name: pair", "name: &name pair").replace("name: b", "name: *name")
    assert parse_cluster_file(again, "pair.yaml").nodes[1].name == "pair"


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the cluster file .*none.yaml: No such file"):
        read_cluster_file(tmp_path / "none.yaml")
