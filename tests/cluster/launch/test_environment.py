"""Which node is this? Every launcher's variables as it sets them."""

from __future__ import annotations

import pytest

from moe_serve.cluster.launch.environment import (
    DEFAULT_PORT,
    NodeEnvironment,
    detect_node,
    is_spare_copy,
    node_flags,
)
from moe_serve.errors import ConfigError

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "CROSS_RANK": "2",
    "CROSS_SIZE": "3",
    "LOCAL_SIZE": "4",
    "RANK": "8",
    "WORLD_SIZE": "12",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "worker-1",
    "MASTER_PORT": "29600",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "node[01-03,7]",
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.9",
}
LWS = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "LWS_LEADER_ADDRESS": "moe-0.moe.default.svc.cluster.local",
    "LWS_GROUP_SIZE": "8",
    "LWS_WORKER_INDEX": "7",
}
STATEFUL = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def detect(
    environ: dict[str, str],
    hostname: str = "host",
    *,
    rank: int | None = None,
    num: int | None = None,
    at: str | None = None,
) -> NodeEnvironment:
    return detect_node(environ, hostname, node_flags(rank, num, at))


def shown(node: NodeEnvironment) -> str:
    return f"{node.kind} {node.node_rank}/{node.num_nodes} {node.coordinator}"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, f"single 0/1 127.0.0.1:{DEFAULT_PORT}"),
        (TORCHRUN, "torchrun 1/2 10.0.0.1:29401"),  # its own store has 29400
        (DEEPSPEED, "deepspeed 2/3 worker-1:29600"),
        (SLURM, f"slurm 3/4 node01:{DEFAULT_PORT + 242}"),
        (LWS, f"leader-worker-set 7/8 moe-0.moe.default.svc.cluster.local:{DEFAULT_PORT}"),
        (SLURM | TORCHRUN, "torchrun 1/2 10.0.0.1:29401"),  # the innermost
        (SLURM | DEEPSPEED, "deepspeed 2/3 worker-1:29600"),
    ],
)
def test_launchers(environ: dict[str, str], expected: str) -> None:
    assert shown(detect(environ)) == expected


def test_a_steps_nodes_are_those_of_slurm() -> None:
    step = {"SLURM_STEP_NODELIST": "node[02-03]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}
    assert shown(detect(SLURM | step)).startswith("slurm 1/2 node02:")


def test_slurm_without_a_node_list_takes_the_launching_node() -> None:
    environ = {name: value for name, value in SLURM.items() if name != "SLURM_JOB_NODELIST"}
    assert detect(environ).coordinator_host == "192.0.2.9"


def test_a_stateful_sets_pod_counts_itself() -> None:
    node = detect(STATEFUL, "moe-serve-5", num=8, at="moe-serve-0.moe-serve:29600")
    assert shown(node) == "stateful-set 5/8 moe-serve-0.moe-serve:29600"
    with pytest.raises(ConfigError, match="--num-nodes, --coordinator HOST:PORT are missing"):
        detect(STATEFUL, "moe-serve-5")


def test_flags_alone() -> None:
    assert shown(detect({}, rank=1, num=2, at="[fd00::1]:7000")) == "flags 1/2 [fd00::1]:7000"


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SLURM, LWS])
def test_flags_win_one_by_one(environ: dict[str, str]) -> None:
    before = detect(environ)
    assert detect(environ, rank=0).node_rank == 0
    assert detect(environ, at="h:1").coordinator_host == "h"
    after = detect(environ, num=100)
    assert (after.num_nodes, after.node_rank) == (100, before.node_rank)
    assert shown(detect(environ, rank=4, num=5, at="h:1")) == "flags 4/5 h:1"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node 2 .GROUP_RANK. .* 2 nodes .GROUP_WORLD_SIZE."),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "two"}, "GROUP_WORLD_SIZE='two'"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "MASTER_PORT [+] 1"),
        ({**DEEPSPEED, "CROSS_SIZE": ""}, "CROSS_SIZE is not set"),
        ({**DEEPSPEED, "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**SLURM, "SLURM_NODEID": ""}, "SLURM_NODEID is not: start the command by srun"),
        ({**SLURM, "SLURM_NODEID": "4"}, "node 4 .SLURM_NODEID. .* 4 nodes .SLURM_NNODES."),
        ({**SLURM, "SLURM_NNODES": "3"}, "SLURM_JOB_NODELIST.* names 4 nodes, .*SLURM_NNODES"),
        ({**SLURM, "SLURM_JOB_NODELIST": "node[1"}, "host list"),
        ({"SLURM_JOB_ID": "1", "SLURM_NODEID": "0", "SLURM_NNODES": "2"}, "SLURM_JOB_NODELIST"),
        ({**LWS, "LWS_GROUP_SIZE": ""}, "LWS_GROUP_SIZE is not set"),
        ({**LWS, "LWS_WORKER_INDEX": "-1"}, "LWS_WORKER_INDEX='-1'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(environ: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        detect(environ)


@pytest.mark.parametrize(
    ("rank", "num", "at", "message"),
    [
        (0, None, None, "--num-nodes, --coordinator HOST:PORT are missing"),
        (None, 2, "h:1", "--node-rank is missing"),
        (2, 2, "h:1", "node 2 .--node-rank. does not exist among 2 nodes .--num-nodes."),
        (-1, 2, "h:1", "node -1"),
        (0, 0, "h:1", "--num-nodes must be 1 or more, got 0"),
        (0, 2, "h", "'h' .--coordinator. is not HOST:PORT"),
        (0, 2, "fd00::1:80", "is not HOST:PORT"),
        (0, 2, "h:70000", "'70000' .--coordinator. is not a port"),
    ],
)
def test_wrong_flags(rank: int | None, num: int | None, at: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect({}, rank=rank, num=num, at=at)


def test_only_the_first_process_of_a_node_stays() -> None:
    for environ in (TORCHRUN, DEEPSPEED, SLURM, LWS, {}, {"LOCAL_RANK": "3"}):
        assert not is_spare_copy(environ), environ
    assert is_spare_copy({**TORCHRUN, "LOCAL_RANK": "1"})
    assert is_spare_copy({**DEEPSPEED, "LOCAL_RANK": "1"})
    assert is_spare_copy({**SLURM, "SLURM_LOCALID": "1"})
