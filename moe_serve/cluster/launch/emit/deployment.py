"""What an emitted file says, whoever reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_serve.cluster.launch.endpoint import Endpoint
from moe_serve.cluster.launch.environment import DEFAULT_PORT
from moe_serve.cluster.launch.launch_command import LaunchCommand
from moe_serve.errors import ConfigError

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One launch on `num_nodes` nodes. `name` is a DNS label, so that it can name everything."""

    name: str
    num_nodes: int
    command: LaunchCommand
    # The coordinator where it is known beforehand; Slurm and Kubernetes find it themselves.
    coordinator: Endpoint | None = None
    http_port: int = 8000
    num_devices: int = 0  # accelerators that each node needs
    variables: Mapping[str, str] = field(default_factory=dict)  # settings without a flag
    image: str = "moe-serve:latest"  # of the containers
    model_claim: str | None = None  # a PersistentVolumeClaim that holds the model

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name!r} cannot name a deployment: it takes at most 40 lower-case letters, "
                "digits and dashes, a letter first."
            )

    @property
    def control_port(self) -> int:
        return DEFAULT_PORT if self.coordinator is None else self.coordinator.port

    def fixed_coordinator(self, emitted: str) -> Endpoint:
        if self.coordinator is None:
            raise ConfigError(
                f"{emitted} files need to know node 0: give --coordinator HOST:PORT, or --cluster."
            )
        return self.coordinator
