"""The lag of the event loop: every missed tick counts, and /metrics shows it."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

from moe_serve.http.server import PERIOD_S, LoopLag, lags


def test_missed_ticks_count_with_their_own_lag() -> None:
    assert lags(1.0, 1.045) == pytest.approx([0.045, 0.025, 0.005])
    assert lags(1.0, 1.0) == [0.0]
    assert lags(1.0, 0.999) == [0.0]
    assert len(lags(0.0, 1e6)) == 3000


def test_a_loop_that_is_held_up_is_seen() -> None:
    seen: list[float] = []

    async def main() -> None:
        lag = LoopLag(asyncio.get_running_loop(), seen.append)
        lag.start()
        await asyncio.sleep(3 * PERIOD_S)
        num_before = len(seen)
        time.sleep(10 * PERIOD_S)
        await asyncio.sleep(3 * PERIOD_S)
        assert len(seen) - num_before >= 11, "what was missed is not there"
        lag.stop()
        num_at_end = len(seen)
        await asyncio.sleep(3 * PERIOD_S)
        assert len(seen) == num_at_end

    asyncio.run(main())
    assert max(seen) > 7 * PERIOD_S


def test_the_server_has_it_in_metrics(live: Any) -> None:
    deadline = time.monotonic() + 60
    while True:
        text = httpx.get(f"{live.url}/metrics").text
        found = re.search(r"^moe_serve:event_loop_lag_seconds_count\{.*\} (\S+)$", text, re.M)
        assert found is not None
        if float(found[1]) > 0:
            return
        assert time.monotonic() < deadline, "no tick was counted"
        time.sleep(0.02)
