"""`router: auto` takes what moves fewer bytes."""

from __future__ import annotations

import pytest

from moe_serve.pipeline.exchange.router_side import (
    broadcast_bytes,
    is_broadcast_worth,
    routed_bytes,
)


@pytest.mark.parametrize(
    ("row_bytes", "top_k", "num_ranks", "expected"),
    [
        (4096, 8, 1, False),  # 4160 against 4100: too little for routing twice
        (4096, 8, 4, False),
        (4096, 8, 32, False),
        (512, 8, 1, True),  # narrow rows: their choices weigh
        (512, 8, 2, True),
        (512, 8, 32, False),
        (512, 1, 4, False),
    ],
)
def test_the_side(row_bytes: int, top_k: int, num_ranks: int, expected: bool) -> None:
    assert is_broadcast_worth(row_bytes, top_k, num_ranks) is expected


def test_bytes() -> None:
    assert routed_bytes(4096, 8, 1) == 4096 + 64
    assert routed_bytes(100, 1, 7) == pytest.approx(108), "one choice, one rank"
    assert broadcast_bytes(4096, 4) == 4 * 4100
