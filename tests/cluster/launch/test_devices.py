"""Which accelerator a rank sees."""

from __future__ import annotations

import pytest

from moe_serve.cluster.members.rank_starter import DEVICES_VARIABLE, shared_device, visible_device
from moe_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "place", "device", "has_some", "expected"),
    [
        (None, 1, None, False, None),  # a node without accelerators
        (None, 1, None, True, "1"),
        (None, 1, 3, True, "3"),
        (None, 0, 3, False, "3"),  # stated, so it must be there
        ("4,5", 1, None, True, "5"),  # Slurm gave this node's task two of eight
        ("4, 5", 1, 0, True, "4"),
        ("GPU-aa,GPU-bb", 1, None, True, "GPU-bb"),
        ("", 0, None, True, None),  # hidden on purpose
    ],
)
def test_visible_device(
    given: str | None, place: int, device: int | None, has_some: bool, expected: str | None
) -> None:
    environ = {} if given is None else {DEVICES_VARIABLE: given}
    assert visible_device(environ, place, device, has_accelerators=has_some) == expected


def test_a_device_that_is_not_visible() -> None:
    with pytest.raises(
        ConfigError, match="needs device 2 of its node, but .*=4,5 lists only 2 devices"
    ):
        visible_device({DEVICES_VARIABLE: "4,5"}, 2, None, has_accelerators=True)
    with pytest.raises(ConfigError, match="needs device 0"):
        visible_device({DEVICES_VARIABLE: ""}, 0, 0, has_accelerators=True)


@pytest.mark.parametrize(
    ("given", "place", "num_devices", "expected"),
    [
        (None, 2, 0, None),  # no GPU here
        (None, 2, 4, "2"),
        (None, 5, 4, "1"),
        (None, 1, 1, "0"),  # two ranks share the only one
        ("4,5", 3, 8, "5"),
        ("GPU-aa", 3, 8, "GPU-aa"),
        ("", 0, 4, None),  # hidden on purpose
    ],
)
def test_ranks_take_turns(
    given: str | None, place: int, num_devices: int, expected: str | None
) -> None:
    environ = {} if given is None else {DEVICES_VARIABLE: given}
    assert shared_device(environ, place, num_devices) == expected
