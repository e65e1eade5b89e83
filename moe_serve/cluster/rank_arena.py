"""The memory tier of a cluster: its memory, its index, and a tier for each attention rank's
engine."""

from __future__ import annotations

from moe_serve.cache.tiers.arena import ArenaIndex, SharedArena
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.config.sections import CacheConfig
from moe_serve.engine.opened_model import LoadReport
from moe_serve.engine.schedule.arena_tier import ArenaTier, RankCopies
from moe_serve.engine.schedule.kv_tier import MakeTier


class RankArena:
    """Memory that the attention ranks of this host share, if the configuration has a memory
    tier."""

    def __init__(self, config: CacheConfig) -> None:
        """Raises ConfigError where the system has no such memory."""
        num_bytes, self._after_s = config.memory_tier_bytes, config.checkpoint_after_s
        self._memory = None if num_bytes is None else SharedArena(num_bytes)
        self._index: ArenaIndex | None = None

    @property
    def path(self) -> str:
        """The path by which ranks open it; empty without a memory tier."""
        return "" if self._memory is None else self._memory.path

    def tier_maker(self, executor: RemoteExecutor, report: LoadReport) -> MakeTier | None:
        """Return what makes the tier of a rank's engine. `report`: that of any attention rank.

        Raises ConfigError if the memory is too small for the pages.
        """
        if self._memory is None:
            return None
        if self._index is None:
            self._index = ArenaIndex(self._memory.num_bytes, report.kv_bytes // report.num_pages)
        index, copies = self._index, RankCopies(executor.save_page, executor.load_page)
        return lambda cache: ArenaTier(cache, index, copies, REAL_CLOCK, self._after_s)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
