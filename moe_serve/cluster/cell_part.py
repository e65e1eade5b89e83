"""The place of a cell among the cells of a server, and what they share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from moe_serve.cache.events.kv_events import KVEvents
from moe_serve.cluster.members.cluster_adapters import ClusterAdapters
from moe_serve.cluster.members.preflight import JOIN_S
from moe_serve.cluster.rank_arena import RankArena
from moe_serve.engine.service.service_policy import ServicePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPart:
    """The place of a cell among the cells of a server, and what they share."""

    name: str = ""  # before the names of its ranks in messages; empty: the only cell
    ids: itertools.count[int] = field(default_factory=itertools.count)  # of sequences
    step_numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    outage_limit_s: float | None = None  # see `Coordinator`; None: as long as a start may take
    patience_s: float = math.inf  # likewise
    kv_events: KVEvents | None = None  # of all cells, whose owner closes it; None: of its own
    first_rank: int = 0  # number of attention ranks in the cells before
    arena: RankArena | None = None  # likewise
    adapters: ClusterAdapters | None = None  # likewise
    policy: ServicePolicy | None = None  # of service tiers, likewise
    join_s: float = JOIN_S  # address to which its ranks connect
