"""Finds this node's number, the number of nodes and node 0's address from the launcher's
variables.

Everything is a function of the variables, the host name and the flags: the network is not used. A
launcher that is detected must have set all its variables. Flags replace its values one by one, and
a cluster file (`cluster_file.py`) replaces the coordinator's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moe_serve.cluster.launch.hosts import HostPort, expand_hostlist, parse_endpoint, parse_port
from moe_serve.errors import ConfigError

DEFAULT_PORT = 29600  # of the coordinator, if the launcher names none
SLURM_PORTS = 1000  # jobs that share a node: the port is DEFAULT_PORT + job number modulo this

NodeKind = Literal[
    "single", "flags", "torchrun", "deepspeed", "slurm", "leader-worker-set", "stateful-set"
]
_ORDINAL = re.compile(r".*-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """One node of a launch. Node 0 coordinates and serves HTTP; the others run a node agent."""

    kind: NodeKind
    node_rank: int
    num_nodes: int
    coordinator_host: str
    coordinator_port: int

    @property
    def coordinator(self) -> HostPort:
        return HostPort(self.coordinator_host, self.coordinator_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFlags:
    """The values of the command line, or None; each overrides the environment."""

    node_rank: int | None = None
    num_nodes: int | None = None
    coordinator: HostPort | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The values that a launcher has set; None for values that it has not set."""

    kind: NodeKind
    node_rank: int | None = None
    num_nodes: int | None = None
    coordinator: HostPort | None = None
    # The variable or other source of each, for the error.
    rank_source: str = "--node-rank"
    size_source: str = "--num-nodes"


def detect_node(
    environ: Mapping[str, str], hostname: str, flags: NodeFlags | None = None
) -> NodeEnvironment:
    """Returns the node that this process is; raises ConfigError with the missing or wrong
    values."""
    flags = flags or NodeFlags()
    found = _look(environ, hostname, flags)
    node_rank = found.node_rank if flags.node_rank is None else flags.node_rank
    num_nodes = found.num_nodes if flags.num_nodes is None else flags.num_nodes
    coordinator = flags.coordinator or found.coordinator
    values = (
        (found.rank_source, node_rank),
        (found.size_source, num_nodes),
        ("--coordinator HOST:PORT", coordinator),
    )
    missing = [name for name, value in values if value is None]
    if node_rank is None or num_nodes is None or coordinator is None:
        raise ConfigError(
            "the number of this node, the number of nodes or the address of node 0 is "
            f"unknown ({found.kind}): {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing."
        )
    rank_source = found.rank_source if flags.node_rank is None else "--node-rank"
    size_source = found.size_source if flags.num_nodes is None else "--num-nodes"
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"node {node_rank} ({rank_source}) does not exist among {num_nodes} nodes "
            f"({size_source}): they are counted from 0."
        )
    return NodeEnvironment(
        kind=found.kind,
        node_rank=node_rank,
        num_nodes=num_nodes,
        coordinator_host=coordinator.host,
        coordinator_port=coordinator.port,
    )


def is_spare_copy(environ: Mapping[str, str]) -> bool:
    """Returns True if the launcher starts a process per device and this is not its first on the
    node.

    torchrun and DeepSpeed count them in LOCAL_RANK, Slurm in SLURM_LOCALID; the first one stays.
    """
    names = {
        "GROUP_RANK": "LOCAL_RANK",
        "CROSS_RANK": "LOCAL_RANK",
        "SLURM_NODEID": "SLURM_LOCALID",
    }
    return any(
        environ.get(mark) and environ.get(name, "0") not in ("", "0")
        for mark, name in names.items()
    )


def _look(environ: Mapping[str, str], hostname: str, flags: NodeFlags) -> _Found:
    """Detects the innermost launcher. torchrun inside Slurm counts as torchrun."""
    if None not in (flags.node_rank, flags.num_nodes, flags.coordinator):
        return _Found(kind="flags")
    if environ.get("GROUP_RANK") or environ.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environ)
    if environ.get("CROSS_RANK"):
        return _deepspeed(environ)
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ, flags)
    if environ.get("LWS_LEADER_ADDRESS") or environ.get("LWS_WORKER_INDEX"):
        return _leader_worker_set(environ)
    if environ.get("KUBERNETES_SERVICE_HOST") and (ordinal := _ORDINAL.fullmatch(hostname)):
        return _Found(
            kind="stateful-set",
            node_rank=int(ordinal[1]),
            rank_source=f"the host name {hostname}",
        )
    if flags == NodeFlags() or flags == NodeFlags(num_nodes=1, node_rank=flags.node_rank):
        return _Found(
            kind="single", node_rank=0, num_nodes=1, coordinator=HostPort("127.0.0.1", DEFAULT_PORT)
        )
    return _Found(kind="flags")


def _torchrun(environ: Mapping[str, str]) -> _Found:
    """Reads torchrun's variables. Its own store uses MASTER_PORT, so the coordinator uses the next
    port."""
    _need(environ, "torchrun", ("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    port = parse_port(environ["MASTER_PORT"], "MASTER_PORT") + 1
    return _Found(
        kind="torchrun",
        node_rank=_count(environ, "GROUP_RANK"),
        num_nodes=_count(environ, "GROUP_WORLD_SIZE"),
        coordinator=HostPort(environ["MASTER_ADDR"], parse_port(str(port), "MASTER_PORT + 1")),
        rank_source="GROUP_RANK",
        size_source="GROUP_WORLD_SIZE",
    )


def _deepspeed(environ: Mapping[str, str]) -> _Found:
    _need(environ, "DeepSpeed", ("CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return _Found(
        kind="deepspeed",
        node_rank=_count(environ, "CROSS_RANK"),
        num_nodes=_count(environ, "CROSS_SIZE"),
        coordinator=HostPort(
            environ["MASTER_ADDR"], parse_port(environ["MASTER_PORT"], "MASTER_PORT")
        ),
        rank_source="CROSS_RANK",
        size_source="CROSS_SIZE",
    )


def _slurm(environ: Mapping[str, str], flags: NodeFlags) -> _Found:
    """Reads Slurm's variables. Those of the step describe where this task runs; those of the job
    may name more nodes.

    Node 0 is the first host of the list. SLURM_LAUNCH_NODE_IPADDR is the host that called srun,
    which under salloc is the login node, so it is used only if there is no list.
    """
    if not environ.get("SLURM_NODEID") and flags.node_rank is None:
        raise ConfigError(
            "SLURM_JOB_ID is set and SLURM_NODEID is not: start the command by srun, with one task "
            "on each node (srun --ntasks-per-node=1 moe-serve launch ...)."
        )
    size_source = _first(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    list_source = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    _need(environ, "Slurm", (size_source,) if flags.num_nodes is None else ())
    num_nodes = _count(environ, size_source) if environ.get(size_source) else None
    host = environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if environ.get(list_source):
        hosts = expand_hostlist(environ[list_source])
        if num_nodes is not None and len(hosts) != num_nodes:
            raise ConfigError(
                f"{list_source}={environ[list_source]} names {len(hosts)} nodes, but {size_source} "
                f"says {num_nodes}."
            )
        host = hosts[0]
    if not host and flags.coordinator is None:
        _need(environ, "Slurm", (list_source,))
    port = DEFAULT_PORT + _count(environ, "SLURM_JOB_ID") % SLURM_PORTS
    return _Found(
        kind="slurm",
        node_rank=_count(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else None,
        num_nodes=num_nodes,
        coordinator=HostPort(host, port) if host else None,
        rank_source="SLURM_NODEID",
        size_source=size_source,
    )


def _leader_worker_set(environ: Mapping[str, str]) -> _Found:
    names = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
    _need(environ, "LeaderWorkerSet", names)
    return _Found(
        kind="leader-worker-set",
        node_rank=_count(environ, "LWS_WORKER_INDEX"),
        num_nodes=_count(environ, "LWS_GROUP_SIZE"),
        coordinator=HostPort(environ["LWS_LEADER_ADDRESS"], DEFAULT_PORT),
        rank_source="LWS_WORKER_INDEX",
        size_source="LWS_GROUP_SIZE",
    )


def _need(environ: Mapping[str, str], launcher: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"this looks like a process of {launcher}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; set what is missing, or give "
            "--node-rank, --num-nodes and --coordinator."
        )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Returns the first variable that is set, or the last name."""
    return next((name for name in names if environ.get(name)), names[-1])


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()) or int(text) > 2**31:
        raise ConfigError(f"{name}={text!r} is not a node number: give an integer of 0 or more.")
    return int(text)


def node_flags(node_rank: int | None, num_nodes: int | None, coordinator: str | None) -> NodeFlags:
    """Parses the flags; raises ConfigError."""
    endpoint = None if coordinator is None else parse_endpoint(coordinator, "--coordinator")
    if num_nodes is not None and num_nodes < 1:
        raise ConfigError(f"--num-nodes must be 1 or more, got {num_nodes}.")
    return NodeFlags(node_rank=node_rank, num_nodes=num_nodes, coordinator=endpoint)
