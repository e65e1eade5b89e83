"""The pages of the real server with the demonstration model, in one process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pictures.headless_chromium import console_errors
from tests.support.dashboard.page_checks import num_updates, run_script, status, text, wait_for
from tests.support.server.server_process import ServerProcess, port_of_ones_own

NUM_LAYERS, TOP_K = 6, 4


@contextlib.contextmanager
def serving(port: int) -> Iterator[str]:
    """Yields the server's address and kills it at the end, as a crash would."""
    server = ServerProcess("--api-key", "secret", "--port", str(port))
    try:
        yield server.url
    finally:
        server.stop()


@pytest.mark.timeout(400)
def test_a_chat_shows_on_both_pages_and_a_crash_is_survived(browser: webdriver.Chrome) -> None:
    port = port_of_ones_own()
    with serving(port) as url:
        browser.get(f"{url}/dashboard/playground")
        wait_for(browser, lambda: browser.find_elements(By.ID, "api-key"), "the question")
        browser.find_element(By.ID, "api-key").send_keys("secret", Keys.ENTER)
        wait_for(browser, lambda: status(browser) == "moe-serve-demo", "the model's name")
        browser.find_element(By.ID, "prompt").send_keys("Tell me a story.", Keys.ENTER)
        wait_for(browser, lambda: "ended: " in text(browser, ".figures"), "the answer")
        tokens = browser.find_elements(By.CLASS_NAME, "token")
        assert f"{len(tokens)} token" in text(browser, ".figures")
        run_script(browser, "arguments[0].focus()", tokens[-1])
        layers = re.findall(r"^layer \d+: (.*)$", text(browser, ".tooltip"), re.M)
        assert [len(ids.split(", ")) for ids in layers] == [TOP_K] * NUM_LAYERS
        browser.get(f"{url}/dashboard")  # in the same tab: the key is known
        wait_for(browser, lambda: "never chosen" in text(browser, "#experts"), "the experts' load")
        assert text(browser, "#tile-finished") == "1"
        assert "No ranks: this server runs in one process." in text(browser, "#ranks")
    wait_for(browser, lambda: "no answer since" in status(browser), "the page notices")
    seen = num_updates(browser)
    with serving(port):
        wait_for(browser, lambda: num_updates(browser) > seen, "it goes on")
        wait_for(browser, lambda: text(browser, "#tile-finished") == "0", "the new process")
        assert "No token in the last 60 s" in text(browser, "#experts")
    # 503: the new process has the port, and loads.
    expected = ("401", "503", "ERR_CONNECTION", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE")
    errors = [e for e in console_errors(browser) if not any(word in e for word in expected)]
    assert errors == []
