"""Whether `cluster.transport` can be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import pytest

from moe_serve.cluster.started_ranks import check_transport
from moe_serve.config.sections import TransportName
from moe_serve.errors import ConfigError

OWN = {"attention-0": "GPU-a", "expert-0": "GPU-b"}
SHARED = {"attention-0": "GPU-a", "expert-0": "GPU-a"}
MIXED = {"attention-0": "GPU-a", "expert-0": "", "expert-1": ""}


@pytest.mark.parametrize("gpus", [SHARED, MIXED])
def test_what_nccl_refuses_the_others_do(gpus: Mapping[str, str]) -> None:
    def is_possible(wanted: TransportName) -> bool:
        try:
            check_transport(wanted, gpus)
        except ConfigError:
            return False
        return True

    found = {wanted: is_possible(wanted) for wanted in get_args(TransportName)}
    assert found == {"auto": True, "host": True, "nccl": False}


def test_nccl_wants_a_gpu_for_each() -> None:
    check_transport("nccl", OWN)
    with pytest.raises(ConfigError, match="attention-0 and expert-0 share a GPU"):
        check_transport("nccl", SHARED)
    with pytest.raises(ConfigError, match="and expert-0, expert-1 has no CUDA GPU"):
        check_transport("nccl", MIXED)
