"""The interface between the scheduler and a tier that keeps copies of KV pages."""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.cache.prefix_cache import PrefixCache
from moe_serve.cache.tiers.store import TierStats
from moe_serve.engine.request.sequence import Schedule, Sequence


class KVTier:
    """The tier of an engine that keeps pages only in its cache, and the base class of other tiers.
    Use it on the engine's thread; only `stats` may be called from any thread.
    """

    @property
    def has_work(self) -> bool:
        """Returns whether `update` has work even without any request."""
        return False

    @property
    def is_due(self) -> bool:
        """Returns whether running sequences should give their full pages now."""
        return False

    @property
    def is_behind(self) -> bool:
        """Returns whether `update` has pages to hand over. The next step must then be scheduled,
        not sent ahead, because only scheduling calls `update`.
        """
        return False

    def entered(self, page: int, key: bytes, parent_key: bytes) -> None:
        """Notes a full page that has entered the prefix cache."""

    def awaits(self, sequence: Sequence) -> bool:
        """Returns whether pages are being read that the sequence would start with."""
        return False

    def begin_load(self, sequence: Sequence, found: list[int]) -> bool:
        """Begins to load the pages that follow the cached ones of a sequence that could start.
        Returns whether the sequence should wait for them. Pages that need no load are added to
        `found`.
        """
        return False

    def update(self) -> None:
        """Takes finished loads, and hands over fresh pages. It is called before each schedule."""

    def step_begins(self, schedule: Schedule) -> None:
        """Notes the step that was scheduled."""

    def step_failed(self) -> None:
        """Notes that the step that was scheduled last failed, or that it was empty."""

    def step_ended(self) -> None:
        """Notes that the step that was scheduled last has ended."""

    def abandon(self) -> None:
        """Notes that the pages are lost with their rank."""

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `DrivenEngine.set_waker`."""

    def close(self) -> None:
        """Stores computed pages, for at most some seconds."""

    def stats(self) -> TierStats | None:
        """Returns a snapshot; None without a tier."""
        return None


MakeTier = Callable[[PrefixCache], KVTier]
