"""Whether ranks can reach each other as `cluster.transport` wants."""

from __future__ import annotations

from collections.abc import Mapping

from moe_serve.config.sections import TransportName
from moe_serve.errors import ConfigError


def check_transport(wanted: TransportName, gpus: Mapping[str, str]) -> None:
    """`gpus`: of each rank, as loaded; empty for none. Raises ConfigError if `wanted` is nccl and a
    rank has no GPU of its own: `auto` and `host` always work."""
    if wanted != "nccl":
        return
    without = [name for name, gpu in gpus.items() if not gpu]
    if without:
        raise ConfigError(
            f"cluster.transport is 'nccl', and {', '.join(without)} has no CUDA GPU that NCCL "
            "reaches: use 'auto' or 'host'."
        )
    owners: dict[str, str] = {}
    for name, gpu in gpus.items():
        if gpu in owners:
            raise ConfigError(
                f"cluster.transport is 'nccl', and {owners[gpu]} and {name} share a GPU, which "
                "NCCL refuses: use 'auto' or 'host'."
            )
        owners[gpu] = name
