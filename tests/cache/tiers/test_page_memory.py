"""Memory for copies of pages is used again, and goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_serve.cache.tiers.page_memory import PageBuffers, anonymous_memory

PAGE = 2**18


def own_bytes() -> int:
    """Returns the memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("the system does not tell")


def test_pages_are_used_again_and_no_two_share_memory() -> None:
    buffers = PageBuffers(3, 64)
    pages = [buffers.take() for _ in range(5)]  # two are the allocator's
    for number, page in enumerate(pages):
        page[:] = number
    assert [set(page.tolist()) for page in pages] == [{number} for number in range(5)]
    for page in pages:
        buffers.give_back(page)
    again = [buffers.take() for _ in range(5)]
    for number, page in enumerate(again):
        page[:] = number
    assert [set(page.tolist()) for page in again] == [{number} for number in range(5)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back_to_the_system() -> None:
    buffers = PageBuffers(128, PAGE)
    before = own_bytes()
    pages = [buffers.take() for _ in range(128)]
    for page in pages:
        page[:] = 1
    assert own_bytes() - before > 100 * PAGE
    for page in pages[1:]:
        buffers.give_back(page)
    buffers.trim()
    assert own_bytes() - before > 100 * PAGE, "a page is in use"
    buffers.give_back(pages[0])
    buffers.trim()
    assert own_bytes() - before < 28 * PAGE
    assert not buffers.take().any(), "new memory"
    memory = anonymous_memory(128, PAGE)
    memory[:] = 1
    del memory
    assert own_bytes() - before < 28 * PAGE
    assert len(anonymous_memory(0, PAGE)) == 0
