"""Whether `cluster.transport` can be had."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moe_serve.cluster.transport_check import check_transport
from moe_serve.config import TransportName
from moe_serve.errors import ConfigError

OWN = {"attention-0": "GPU-a", "expert-0": "GPU-b"}
SHARED = {"attention-0": "GPU-a", "expert-0": "GPU-a"}
MIXED = {"attention-0": "GPU-a", "expert-0": "", "expert-1": ""}


@pytest.mark.parametrize("gpus", [OWN, SHARED, MIXED])
@pytest.mark.parametrize("wanted", ["auto", "host"])
def test_always_possible(wanted: TransportName, gpus: Mapping[str, str]) -> None:
    check_transport(wanted, gpus)


def test_nccl_wants_a_gpu_for_each() -> None:
    check_transport("nccl", OWN)
    with pytest.raises(ConfigError, match="attention-0 and expert-0 share a GPU"):
        check_transport("nccl", SHARED)
    with pytest.raises(ConfigError, match="and expert-0, expert-1 has no CUDA GPU"):
        check_transport("nccl", MIXED)
