"""A crowd of visitors: each chooses what to be, visits, rests, and comes again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx

from soak.visitors import LIMIT_S, VISITORS, Host


@dataclass(slots=True)
class Seen:
    """The results of the visits, by kind."""

    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in VISITORS}
    )
    failures: list[str] = field(default_factory=list)

    @property
    def num_visits(self) -> int:
        return sum(sum(counter.values()) for counter in self.counts.values())

    def note(self, name: str, outcome: str) -> None:
        self.counts[name][outcome] += 1
        if outcome not in VISITORS[name].may_see:
            self.failures.append(f"{name}: {outcome}")


# More schemas than a server caches: a full cache does not grow.
_FILLING, _NUM_FILLING = "structured output", 160


async def keep_visiting(
    url: str, num_visitors: int, rest_s: float, seed: int, seen: Seen, stop: asyncio.Event
) -> None:
    """Until `stop` is set; visits that have begun are finished."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=num_visitors)
    async with httpx.AsyncClient(
        base_url=url, timeout=LIMIT_S, trust_env=False, limits=limits
    ) as client:
        hosts = [Host(client, random.Random(f"{seed}-{i}")) for i in range(num_visitors)]
        for _ in range(_NUM_FILLING):
            seen.note(_FILLING, await _visit(_FILLING, hosts[0]))
        await asyncio.gather(*(_keep_visiting(host, rest_s, seen, stop) for host in hosts))


async def _keep_visiting(host: Host, rest_s: float, seen: Seen, stop: asyncio.Event) -> None:
    names = list(VISITORS)
    weights = [VISITORS[name].weight for name in names]
    while not stop.is_set():
        (name,) = host.rng.choices(names, weights)
        seen.note(name, await _visit(name, host))
        await asyncio.sleep(host.rng.expovariate(1 / rest_s) if rest_s else 0)


async def _visit(name: str, host: Host) -> str:
    try:
        return await asyncio.wait_for(VISITORS[name].visit(host), LIMIT_S)
    except asyncio.TimeoutError:
        return f"no end within {LIMIT_S:g} s"
    except (httpx.HTTPError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
