"""The facts of a launch that every kind of emitted file needs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_serve import __version__
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.host_port import HostPort
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


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
