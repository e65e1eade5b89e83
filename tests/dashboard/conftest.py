"""One browser for all tests of the pages, and made-up servers for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from pictures.headless_chromium import (
    browser_paths,
    console_errors,
    requested_urls,
    set_view,
    start_chromium,
)
from tests.support.dashboard.fake_server import FakeServer, running


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    if browser_paths() is None:
        pytest.skip("no chromium and chromedriver on this machine")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = start_chromium(Path(profile))
        yield driver
        driver.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> webdriver.Chrome:
    """Resets the browser: no key, no theme, an empty log, and a blank page.

    The last test's page would go on asking its server, which has ended, and write into this test's
    log.
    """
    chromium.get("about:blank")
    set_view(chromium, 1280, 900)
    console_errors(chromium)
    requested_urls(chromium)
    return chromium


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Starts made-up servers, each on its own port, so that the browser stores their data apart."""
    with running(FakeServer()) as server:
        yield server
