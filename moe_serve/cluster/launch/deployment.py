"""The command that runs on every node, and the other facts that emitted files need.

The command never holds a secret: secrets travel in the environment, on standard input, or as @FILE.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_serve import __version__
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """`moe-serve launch ...` without the options that differ between nodes."""

    model: str | None
    attention_ranks: int | None  # None: as in the cluster file
    expert_ranks: int | None
    cluster_file: str | None = None  # a path that every node has
    secret_file: str | None = None  # the same
    serve_flags: tuple[str, ...] = ()  # ("--port", "9000"), as `serve` takes them

    def arguments(
        self,
        *,
        node_rank: int | str | None = None,
        num_nodes: int | None = None,
        coordinator: HostPort | str | None = None,
    ) -> tuple[str, ...]:
        """Returns the arguments after the program: `launch MODEL --attention-ranks 2 ...`."""
        options = {
            "--attention-ranks": self.attention_ranks,
            "--expert-ranks": self.expert_ranks,
            "--cluster": self.cluster_file,
            "--secret-file": self.secret_file,
            "--node-rank": node_rank,
            "--num-nodes": num_nodes,
            "--coordinator": coordinator,
        }
        given = [
            text
            for name, value in options.items()
            if value is not None
            for text in (name, str(value))
        ]
        model = [] if self.model is None else [self.model]
        return ("launch", *model, *given, *self.serve_flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One launch on `num_nodes` nodes. `name` is a DNS label, so that every object can have it."""

    name: str
    num_nodes: int
    command: LaunchCommand
    # The coordinator if it is known beforehand; Slurm and Kubernetes find it themselves.
    coordinator: HostPort | None = None
    http_port: int = 8000
    num_devices: int = 0  # accelerators that each node needs
    variables: Mapping[str, str] = field(default_factory=dict)  # settings without a flag
    image: str | None = None  # of the containers; None: our image of this version
    model_claim: str | None = None  # a PersistentVolumeClaim that holds the model
    drain_timeout_s: float = 30.0
    probe_scheme: Literal["HTTP", "HTTPS"] | None = "HTTP"  # None: probes have no certificate

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot name a deployment: use at most 40 lower-case letters, "
                "digits and dashes, a letter first."
            )

    @property
    def control_port(self) -> int:
        return DEFAULT_PORT if self.coordinator is None else self.coordinator.port

    @property
    def container_image(self) -> str:
        """Returns the image that docs/operate/deploy.md builds; nodes need the same version."""
        return self.image or f"moe-serve:{__version__}-{'cuda' if self.num_devices else 'cpu'}"

    @property
    def stop_timeout_s(self) -> int:
        """Returns the seconds from SIGTERM to SIGKILL: the drain, and a minute for the nodes to
        leave."""
        return math.ceil(self.drain_timeout_s) + 60

    def fixed_coordinator(self, emitted: str) -> HostPort:
        if self.coordinator is None:
            raise ConfigError(
                f"{emitted} files need node 0's address: give --coordinator HOST:PORT or --cluster."
            )
        return self.coordinator
