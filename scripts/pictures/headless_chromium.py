"""Drives a headless Chromium by selenium, which connects to this machine only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
)


def browser_paths() -> tuple[str, str] | None:
    """Returns Chromium and its driver; None if one is missing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def start_chromium(profile: Path) -> webdriver.Chrome:
    paths = browser_paths()
    assert paths is not None, "chromium and chromedriver are needed"
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(paths[1]))
    driver.set_script_timeout(60)
    return driver


def set_view(driver: webdriver.Chrome, width: int, height: int, theme: str = "light") -> None:
    """Sets the page's size in CSS pixels, and the preferences of the system."""
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    features = [{"name": "prefers-color-scheme", "value": theme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def console_errors(driver: webdriver.Chrome) -> list[str]:
    """Returns the console's messages since the last call, at the level of warnings and above."""
    entries = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]


def requested_urls(driver: webdriver.Chrome) -> list[str]:
    """Returns every address that the page has requested since the last call."""
    messages: list[dict[str, Any]] = [
        json.loads(entry["message"])["message"]
        for entry in driver.get_log("performance")  # type: ignore[no-untyped-call]
    ]
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
