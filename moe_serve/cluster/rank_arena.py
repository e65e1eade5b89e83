"""The tiers of a cluster: the memory that its attention ranks share, the disk behind it, and a tier
for each attention rank's engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from moe_serve.cache.shared_memory import SharedMemory
from moe_serve.cache.tiers.arena import ArenaIndex
from moe_serve.clock import REAL_CLOCK
from moe_serve.cluster.steps.remote_executor import RemoteExecutor
from moe_serve.config.sections import EngineConfig
from moe_serve.engine.build_tiers import open_disk
from moe_serve.engine.opened_model import LoadReport
from moe_serve.engine.schedule.arena_disk import ArenaDisk
from moe_serve.engine.schedule.arena_tier import ArenaTier, RankCopies
from moe_serve.engine.schedule.kv_tier import MakeTier

_NEEDED_BY = "cache.memory_tier_bytes or cache.disk_path is set for attention ranks"
_STAGING_BYTES = 2**30  # size of the memory in front of a disk; only the used part takes memory


class RankArena:
    """Memory that the attention ranks of this host share, if the configuration has a memory tier
    or a disk tier."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError if the system has no such memory."""
        self._config, num_bytes = config, config.cache.memory_tier_bytes
        if num_bytes is None and config.cache.disk_path is not None:
            num_bytes = _STAGING_BYTES
        self._memory = None if num_bytes is None else SharedMemory(num_bytes, _NEEDED_BY)
        self._index: ArenaIndex | None = None
        self._disk: ArenaDisk | None = None
        self._lock = threading.Lock()  # cells start at the same time

    @property
    def path(self) -> str:
        """The path by which ranks open it; empty without a tier."""
        return "" if self._memory is None else self._memory.path

    def open(self, model_folder: Path, report: LoadReport, reports: Sequence[LoadReport]) -> None:
        """Divides the memory into slots, and opens the disk. `report` comes from any attention
        rank, and `reports` from all ranks of a cell. Later calls, by other cells, change nothing.

        Raises ConfigError if the memory is too small for the pages, or the folder cannot be used.
        """
        with self._lock:
            if self._memory is not None and self._index is None:
                self._open(self._memory, model_folder, report, reports)

    def _open(
        self,
        memory: SharedMemory,
        model_folder: Path,
        report: LoadReport,
        reports: Sequence[LoadReport],
    ) -> None:
        config, slot_bytes = self._config, report.page_bytes
        index = ArenaIndex(memory.num_bytes, slot_bytes)
        if config.cache.disk_path is None:
            self._index = index
            return
        # What computes a page's values beside the rank that holds it. Experts may be elsewhere.
        # The number of shards changes neither the values nor the form of a page in a slot.
        kinds = {(r.kernels, r.build, r.device, r.dtype, r.expert_weights) for r in reports}
        layout = {"ranks": repr(sorted(kinds))}
        store = open_disk(config, model_folder, report, page_bytes=slot_bytes, layout=layout)
        slots, page_size = memory.slots(slot_bytes), config.cache.page_size
        self._index = index
        self._disk = ArenaDisk(index, slots, store, page_size, REAL_CLOCK)

    def tier_maker(self, executor: RemoteExecutor) -> MakeTier | None:
        """Returns the function that makes the tier of a rank's engine; None without a tier."""
        if self._index is None:
            return None
        index, disk, after_s = self._index, self._disk, self._config.cache.checkpoint_after_s
        copies = RankCopies(executor.save_page, executor.load_page, executor.finish_copies)
        return lambda cache: ArenaTier(cache, index, copies, REAL_CLOCK, after_s, disk)

    def wait(self) -> None:
        """Waits a moment if requests wait for pages of the disk."""
        if self._disk is not None:
            self._disk.wait()

    def close(self) -> None:
        """Writes the pages that are in the memory but not on the disk yet, for at most some
        seconds.
        """
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()
        if self._memory is not None:
            self._memory.close()
