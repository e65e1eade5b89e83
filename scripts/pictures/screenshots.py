"""Takes the pictures of docs/operate/dashboard.md: a server with ranks under load, in Chromium.

    PYTHONPATH=scripts python -m pictures.screenshots [PORT]

Serves the demonstration model with one attention and two expert ranks, lets eight clients talk to
it for a minute, and writes docs/images/dashboard*.png and playground*.png. Needs chromium,
chromedriver and the extra `test` (selenium). Takes about three minutes.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from pictures.headless_chromium import set_view, start_chromium

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
VIEWS = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))
MAX_BYTES = 300_000
QUESTION = "Write a python function that adds two numbers."
NUM_CLIENTS = 8
REBALANCING = {
    "MOE_SERVE_CLUSTER_REBALANCE": "auto",
    "MOE_SERVE_CLUSTER_REBALANCE_INTERVAL_S": "25",
    "MOE_SERVE_CLUSTER_REBALANCE_MIN_GAIN": "0.01",
    "MOE_SERVE_CLUSTER_REBALANCE_SPARE_SLOTS": "1",
}
LOAD_S = 75
PROMPTS = (
    "Tell me a story about a king.",
    "What is 17 + 25?",
    "def add(a, b):",
    "Write a letter to a friend.",
    "Once upon a time there was a bell",
)


def main(port: int) -> int:
    with serving(port) as url:
        with talking(url), chromium() as browser:
            time.sleep(LOAD_S)
            written = [dashboard(browser, url, *view) for view in VIEWS]
        with chromium() as browser:
            written += [playground(browser, url, *view) for view in VIEWS]
    too_large = [path for path in written if path.stat().st_size > MAX_BYTES]
    for path in written:
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
    for path in too_large:
        print(f"{path.name} is larger than {MAX_BYTES // 1000} kB", file=sys.stderr)
    return 1 if too_large else 0


@contextlib.contextmanager
def serving(port: int) -> Iterator[str]:
    """Yields the address of a server with ranks when it is ready."""
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port)]
    command += ["--attention-ranks", "1", "--expert-ranks", "2", "--micro-batches", "2"]
    command += ["--batch-policy", "expert-aware", "--predictor", "moe_serve/demo_model/predictor"]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **REBALANCING})
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}; its words are above")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health/ready").status_code == 200:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def talking(url: str) -> Iterator[None]:
    """Runs clients that send one request after the other while the block runs."""
    is_over = threading.Event()
    clients = [
        threading.Thread(target=talk, args=(url, number, is_over)) for number in range(NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def talk(url: str, number: int, is_over: threading.Event) -> None:
    choice = random.Random(number)
    while not is_over.wait(choice.uniform(0, 1.5)):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": choice.choice(PROMPTS)}],
            "max_tokens": choice.randint(24, 160),
            "ignore_eos": True,
        }
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = start_chromium(Path(profile))
        try:
            yield browser
        finally:
            browser.quit()


def dashboard(browser: webdriver.Chrome, url: str, width: int, theme: str) -> Path:
    set_view(browser, width, 900, theme)
    browser.get(f"{url}/dashboard")
    _wait(browser, lambda: int(_updates(browser)) > 3)
    return _whole_page(browser, "dashboard", width, theme)


def playground(browser: webdriver.Chrome, url: str, width: int, theme: str) -> Path:
    """Gets one answer and selects a token in its middle."""
    set_view(browser, width, 860, theme)
    browser.get(f"{url}/dashboard/playground")
    settings = browser.find_element(By.CSS_SELECTOR, ".settings summary")
    settings.click()
    _fill(browser, "temperature", "0")
    _fill(browser, "max-tokens", "48")
    settings.click()
    browser.find_element(By.ID, "prompt").send_keys(QUESTION, Keys.ENTER)
    _wait(browser, lambda: "ended" in browser.find_element(By.CLASS_NAME, "figures").text)
    tokens = browser.find_elements(By.CLASS_NAME, "token")
    browser.execute_script("arguments[0].focus()", tokens[len(tokens) // 3])
    return _whole_page(browser, "playground", width, theme)


def _fill(browser: webdriver.Chrome, field: str, value: str) -> None:
    node = browser.find_element(By.ID, field)
    node.clear()
    node.send_keys(value)


def _updates(browser: webdriver.Chrome) -> str:
    return browser.find_element(By.TAG_NAME, "body").get_attribute("data-updates") or "0"


def _whole_page(browser: webdriver.Chrome, name: str, width: int, theme: str) -> Path:
    script = "return document.documentElement.scrollHeight"
    height = int(browser.execute_script(script))
    set_view(browser, width, height, theme)
    time.sleep(1.2)  # one more update at the new size
    parts = [name, *(["390"] if width == 390 else []), *(["dark"] if theme == "dark" else [])]
    path = IMAGES / f"{'-'.join(parts)}.png"
    browser.save_screenshot(str(path))
    return path


def _wait(browser: webdriver.Chrome, condition: Any) -> None:
    WebDriverWait(browser, 60, 0.2).until(lambda _: condition())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8150))
