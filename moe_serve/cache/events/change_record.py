"""The changes of one prefix cache that were not published yet.

The engine's thread writes them and the publisher's thread takes them. A page that enters and leaves
in between cancels out, so a record never holds more than the cache itself, however slow the
publisher is: nothing is dropped, and the engine never waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.clock import REAL_CLOCK, Clock


@dataclass(frozen=True, slots=True)
class PageOrigin:
    """The facts beside its tokens that the content of a page depends on."""

    adapter: str | None = None  # name; None: the base model
    salt: str = ""


BASE_MODEL = PageOrigin()


@dataclass(frozen=True, slots=True)
class PublishedPage:
    """A full page of a prefix cache."""

    key: bytes
    parent_key: bytes | None  # None: the page begins a prompt
    tokens: NDArray[np.int32]
    origin: PageOrigin


@dataclass(frozen=True, slots=True)
class Changes:
    """The difference between two states of a prefix cache: the pages that left, children first,
    then those that came, parents first."""

    is_cleared: bool  # the first state counts as empty
    removed: tuple[bytes, ...]
    stored: tuple[PublishedPage, ...]


class PageListener:
    """Gets the full pages that enter and leave a prefix cache. This base class ignores them."""

    @property
    def is_due(self) -> bool:
        """Returns whether running sequences should give their full pages now."""
        return False

    def stored(self, page: PublishedPage) -> None:
        """Notes a page that requests can now find. They can already find its parent."""

    def removed(self, key: bytes) -> None:
        """Notes a page that requests can no longer find. It has no children."""

    def cleared(self) -> None:
        """Notes that all pages are lost."""

    def step_ended(self) -> None:
        """Notes the end of a step. Changes of one step belong together."""

    def close(self) -> None:
        """Ends the listening. Calls after it have no effect."""


IGNORE_PAGES = PageListener()


class ChangeRecord(PageListener):
    """Collects changes until they are taken. A new record starts from an empty cache."""

    def __init__(
        self,
        wake: Callable[[], None],
        close: Callable[[], None],
        clock: Clock = REAL_CLOCK,
        give_after_s: float = math.inf,
    ) -> None:
        """`wake` is called when changes can be taken; it must not wait. `close` ends the publisher.
        `give_after_s` is the time after which running sequences give their full pages.
        """
        self._wake, self._close, self._clock = wake, close, clock
        self._give_after_s, self._next_give = give_after_s, clock() + give_after_s
        self._lock = threading.Lock()
        self._is_cleared = True
        self._removed: dict[bytes, None] = {}
        self._stored: dict[bytes, PublishedPage] = {}

    @property
    def is_due(self) -> bool:
        """See `PageListener.is_due`."""
        return self._clock() >= self._next_give

    def stored(self, page: PublishedPage) -> None:
        """See `PageListener.stored`."""
        with self._lock:
            if page.key in self._removed:
                del self._removed[page.key]  # subscribers still have it
            else:
                self._stored[page.key] = page

    def removed(self, key: bytes) -> None:
        """See `PageListener.removed`."""
        with self._lock:
            if self._stored.pop(key, None) is None:
                self._removed[key] = None

    def cleared(self) -> None:
        """See `PageListener.cleared`. It is published at once."""
        with self._lock:
            self._is_cleared, self._removed, self._stored = True, {}, {}
        self._wake()

    def step_ended(self) -> None:
        """See `PageListener.step_ended`."""
        if self.is_due:
            self._next_give = self._clock() + self._give_after_s
        if self._stored or self._removed:
            self._wake()

    def close(self) -> None:
        """See `PageListener.close`."""
        self._close()

    def take(self) -> Changes | None:
        """Returns the changes since the last call; None if there are none."""
        with self._lock:
            is_cleared, removed, stored = self._is_cleared, self._removed, self._stored
            self._is_cleared, self._removed, self._stored = False, {}, {}
        if not (is_cleared or removed or stored):
            return None
        return Changes(is_cleared, tuple(removed), tuple(stored.values()))


def update(pages: dict[bytes, PublishedPage], changes: Changes) -> None:
    """Brings `pages`, all pages of a cache by key and parents first, up to date."""
    if changes.is_cleared:
        pages.clear()
    for key in changes.removed:
        del pages[key]
    pages.update((page.key, page) for page in changes.stored)
