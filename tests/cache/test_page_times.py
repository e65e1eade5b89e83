"""The times of sampled pages: which pages are measured, over which interval, and which are
dropped."""

from __future__ import annotations

import random

from moe_serve.cache.histogram import Histogram, HistogramCounter
from moe_serve.cache.page_key import following_keys, root_key, token_array
from moe_serve.cache.page_times import BOUNDS_S, PageTimes, SampledPages
from moe_serve.cache.prefix_cache import PrefixCache

ROOT = root_key(b"model", b"", "")


class World:
    """A cache of three pages whose clock a test sets."""

    def __init__(self, rate: float, draws: list[float] | None = None) -> None:
        self.now = 100.0
        draw = None if draws is None else iter(draws).__next__
        self.sampled = SampledPages(rate, lambda: self.now, draw)
        self.cache = PrefixCache(3, 16, self.sampled)

    def enter(self, page: int, first_token: int) -> int:
        tokens = token_array(range(first_token, first_token + 16))
        (key,) = following_keys(ROOT, tokens, 16)
        return self.cache.enter(page, key, ROOT, tokens)

    def times(self) -> PageTimes:
        return self.sampled.snapshot()


def summed(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), histogram.total


def test_from_when_to_when() -> None:
    world = World(1.0)
    page = world.enter(*world.cache.allocate(1), 0)
    world.now = 110.0
    world.cache.release([page])
    for now in (113.0, 118.0):  # found twice
        world.now = now
        world.cache.hold([page])
        world.cache.release([page])
    assert summed(world.times().lifetime) == (0, 0.0), "it is still there"
    assert summed(world.times().reuse_gap) == (1, 5.0)
    world.now = 120.0
    world.cache.allocate(3)
    times = world.sampled.snapshot()
    assert summed(times.lifetime) == (1, 20.0)
    assert summed(times.idle) == (1, 2.0), "since it was found the last time"
    assert times.lifetime.counts[BOUNDS_S.index(20.0)] == 1, "a bound is below itself"
    assert len(world.sampled) == 3, "those handed out just now"


def test_what_was_never_found_is_idle_from_the_beginning() -> None:
    world = World(1.0)
    page = world.enter(*world.cache.allocate(1), 0)
    world.cache.release([page])
    world.now = 104.0
    world.cache.allocate(3)
    times = world.sampled.snapshot()
    assert summed(times.idle) == summed(times.lifetime) == (1, 4.0)
    assert summed(times.reuse_gap) == (0, 0.0)


def test_what_is_not_evicted_is_forgotten() -> None:
    world = World(1.0)
    world.cache.release(world.cache.allocate(2))  # never in the cache
    first = world.enter(*world.cache.allocate(1), 0)
    (second,) = world.cache.allocate(1)
    assert world.enter(second, 0) == first, "the same content: the owner changes to that page"
    assert len(world.sampled) == 1
    world.cache.release([first])
    world.cache.release([first])
    world.cache.forget([first])  # its request failed
    assert len(world.sampled) == 0 and world.times() == PageTimes()


def test_the_drawn_pages_are_measured() -> None:
    world = World(0.5, [0.7, 0.5, 0.49])
    pages = [world.enter(page, 100 * page) for page in world.cache.allocate(3)]
    assert len(world.sampled) == 1
    world.cache.release(pages)
    world.sampled._draw = lambda: 0.99
    world.now = 101.0
    world.cache.allocate(3)
    assert world.cache.num_evicted == 3
    assert summed(world.sampled.snapshot().lifetime) == (1, 1.0)


def test_none_are_drawn_at_rate_0() -> None:
    world = World(0.0, [])
    pages = [world.enter(page, 100 * page) for page in world.cache.allocate(3)]
    world.cache.release(pages)
    world.cache.allocate(3)
    assert len(world.sampled) == 0 and world.sampled.snapshot() == PageTimes()


def test_the_draw_is_nobody_elses() -> None:
    random.seed(1)
    state = random.getstate()
    SampledPages(0.5).handed_out(range(100))
    assert random.getstate() == state


def test_histograms_add_up() -> None:
    one, two = HistogramCounter((1.0, 2.0)), HistogramCounter((1.0, 2.0))
    for value in (0.5, 1.0, 2.5):
        one.count(value)
    two.count(1.5)
    both = one.snapshot() + two.snapshot() + Histogram.empty((1.0, 2.0))
    assert (both.counts, both.total) == ((2, 1, 1), 5.5)
