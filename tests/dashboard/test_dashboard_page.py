"""The dashboard in a real browser, over made-up states."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pictures.headless_chromium import console_errors, requested_urls, set_view
from tests.support.dashboard.fake_server import FakeServer
from tests.support.dashboard.fake_state import fake_state, idle_state
from tests.support.dashboard.page_checks import (
    contrasts,
    num_updates,
    open_dashboard,
    overflow,
    run_script,
    status,
    text,
    wait_for,
)

PANELS = [
    "experts",
    "service",
    "adapters",
    "requests",
    "ttft",
    "tpot",
    "step",
    "throughput",
    "kv",
    "ranks",
    "placement",
    "predictor",
    "events",
]


def test_every_panel_shows_its_figures(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    assert status(browser) == "live"
    panels = browser.find_elements(By.CLASS_NAME, "panel")
    assert [panel.get_attribute("id") for panel in panels] == PANELS
    expected = {
        "#server": "made-up",
        "#tile-running": "12",
        "#tile-ttft": "41.2 ms",
        "#tiles": "1.90 per step, 82% accepted",
        "#requests": "3 requests waiting",
        "#ttft": "141 ms",
        "#tpot": "198 in 60 s",
        "#throughput": "generated",
        "#kv": "900 MiB",
        "#experts": "layer 2, expert 5 with",
        "#ranks": "57% · 1.14×",
        "#step": "2 micro-batches (planned)",
        "#placement": "from expert-0 to expert-1",
        "#predictor": "62%",
        "#events": "2 experts moved.",
        "#service": "last 5 min; forecasts of the first token are off by 14%",
        "#service tbody": "interactive weight 4: first token 1.0 s, per token 100 ms",
        "#service tbody tr:nth-child(2)": "71%",
        "#adapters": "57 names, 1.46 GiB of 2 GiB in memory, 96 MiB pinned, dropped 33 times",
        "#adapters tbody": "support-assistant\tpinned\t7\t2\t96 MiB\tLoRA r 16\t3f9a0c1d",
        "#adapters tbody tr:nth-child(2)": "team/legal:<i>contracts</i>",
        "#adapters tbody tr:nth-child(3)": "dropped\t0\t0\t412 MiB\tESFT\t3f9a0c1d",
        "#service .tenants": "user:<b>bob</b> (interactive)",
    }
    for selector, words in expected.items():
        assert words in text(browser, selector), selector
    # By one script: the next state replaces them.
    script = (
        "return [...document.querySelectorAll('path.curve')].map((node) => node.getAttribute('d'))"
    )
    curves = run_script(browser, script)
    assert len(curves) == 2 + 1 + 1 + 2 + 1
    assert all(curve.count("L") > 50 for curve in curves)
    for panel in ("experts", "step"):
        assert num_colours(browser, f"#{panel} canvas") > 4, f"{panel} is not drawn"
    assert console_errors(browser) == []
    hosts = {urlsplit(url).netloc for url in requested_urls(browser) if url.startswith("http")}
    assert hosts == {urlsplit(fake.url).netloc}


def test_it_updates_and_events_come_once(browser: webdriver.Chrome, fake: FakeServer) -> None:
    def make_state(now: float, started: float) -> dict[str, Any]:
        state = fake_state(now, started)
        state["requests"]["running"] = len(fake.since)
        if len(fake.since) > 2:
            words = "expert-1 was <b>lost</b>."
            state["events"].append({"seq": 3, "time": now, "kind": "rank_lost", "text": words})
            state["ranks"][2] |= {"phase": "starting", "load": None, "busy": None, "restarts": 1}
        return state

    fake.make_state = make_state
    open_dashboard(browser, fake.url)
    first = text(browser, "#tile-running")
    wait_for(browser, lambda: "<b>lost</b>" in text(browser, "#events"), "the event, as text")
    wait_for(browser, lambda: text(browser, "#tile-running") != first, "another figure")
    seen = num_updates(browser)
    wait_for(browser, lambda: num_updates(browser) > seen + 1, "two more updates")
    assert text(browser, "#events").count("lost</b>") == 1
    assert fake.since[-1] == 3
    assert "1 of 3 not serving" in text(browser, "#ranks")
    assert "away" in text(browser, "#ranks") and "nothing to do" not in text(browser, "#ranks")
    assert "1 restart" in text(browser, "#ranks")
    assert console_errors(browser) == []


def test_pages_that_are_away_with_their_rank(browser: webdriver.Chrome, fake: FakeServer) -> None:
    def without_pages(now: float, started: float) -> dict[str, Any]:
        state = fake_state(now, started)
        state["ranks"][0] |= {"phase": "starting", "load": None, "busy": None}
        state["kv"]["tiers"] = [{"name": "memory", "pages": 0, "used": 0, "cached": 0}]
        return state

    fake.make_state = without_pages
    open_dashboard(browser, fake.url)
    tile = "return document.getElementById('tile-kv').parentNode.innerText"
    assert run_script(browser, tile).split("\n")[1:] == ["–", "attention-0 is away"]
    assert text(browser, "#kv .empty") == "No KV pages: attention-0 is away."
    fake.make_state = fake_state
    wait_for(browser, lambda: "420 of 1,000" in run_script(browser, tile), "it is back")
    assert text(browser, "#kv .empty") == "" and "420 of 1,000" in text(browser, "#kv")
    assert console_errors(browser) == []


def test_a_restart_is_survived(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    fake.stop()
    wait_for(browser, lambda: "no answer since" in status(browser), "the page notices")
    wait_for(browser, lambda: "does not answer" in text(browser, "#notice"), "the notice")
    assert text(browser, "#tile-running") == "12", "the last figures stay"
    seen = num_updates(browser)
    time.sleep(0.05)  # the new server's start is another time
    fake.start()
    wait_for(browser, lambda: num_updates(browser) > seen, "it goes on without a reload")
    wait_for(browser, lambda: status(browser) == "live", "live")
    assert not browser.find_element(By.ID, "notice").is_displayed()
    assert 0 in fake.since[2:], "events of the new process are asked for from the beginning"
    assert text(browser, "#events").count("The server is ready.") == 2
    expected = ("ERR_CONNECTION", "ERR_EMPTY_RESPONSE")  # perhaps in the middle of an answer
    errors = [e for e in console_errors(browser) if not any(word in e for word in expected)]
    assert errors == []


def test_a_key_is_asked_for(browser: webdriver.Chrome, fake: FakeServer) -> None:
    fake.keys = ("schlüssel",)
    browser.get(f"{fake.url}/dashboard")
    wait_for(browser, lambda: browser.find_elements(By.TAG_NAME, "dialog"), "the question")
    assert status(browser) == "an API key is needed"
    field = browser.find_element(By.ID, "api-key")
    assert field.get_attribute("type") == "password"
    field.send_keys("wrong", Keys.ENTER)
    wait_for(browser, lambda: "did not accept" in text(browser, "dialog"), "the second question")
    browser.find_element(By.ID, "api-key").send_keys("schlüssel", Keys.ENTER)
    wait_for(browser, lambda: num_updates(browser) > 0, "the state")
    assert "schlüssel" not in browser.current_url
    open_dashboard(browser, fake.url)
    assert not browser.find_elements(By.TAG_NAME, "dialog"), "the tab keeps the key"
    assert run_script(browser, "return localStorage.length") == 0
    assert [e for e in console_errors(browser) if "401" not in e] == []


def test_what_is_missing_is_said(browser: webdriver.Chrome, fake: FakeServer) -> None:
    fake.make_state = idle_state
    open_dashboard(browser, fake.url)
    expected = {
        "#experts": "No token in the last 60 s",
        "#ttft": "none in the last 60 s",
        "#step": "one process",
        "#ranks": "No ranks",
        "#placement": "No expert ranks",
        "#predictor": "No predictor",
        "#events": "Nothing has happened yet.",
    }
    for selector, words in expected.items():
        assert words in text(browser, selector), selector
    assert not browser.find_element(By.ID, "service").is_displayed(), "there are no tiers"
    assert console_errors(browser) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable(
    browser: webdriver.Chrome, fake: FakeServer, width: int, theme: str
) -> None:
    set_view(browser, width, 900, theme)
    open_dashboard(browser, fake.url)
    assert run_script(browser, "return document.documentElement.dataset.theme") == theme
    assert run_script(browser, "return document.documentElement.scrollWidth") == width
    assert overflow(browser) == []
    found = contrasts(browser)
    assert len(found) > 60
    assert [item for item in found if item[0] < 4.5] == []


def test_the_theme_can_be_chosen(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    button = browser.find_element(By.ID, "theme")
    background = "return getComputedStyle(document.body.parentElement).backgroundColor"
    light = run_script(browser, background)
    assert button.text == "Theme: auto"
    button.click()
    assert (button.text, run_script(browser, background)) == ("Theme: light", light)
    button.click()
    assert button.text == "Theme: dark" and run_script(browser, background) != light
    browser.refresh()
    assert run_script(browser, "return document.documentElement.dataset.theme") == "dark"


def test_the_keyboard_reads_charts(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    heat_map = browser.find_element(By.CSS_SELECTOR, "#experts canvas")
    heat_map.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert text(browser, ".tooltip").startswith("Layer 1, expert 1\n")
    assert "its layer's mean" in text(browser, "[aria-live=polite].hidden")
    timeline = browser.find_element(By.CSS_SELECTOR, "#step canvas")
    timeline.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "attention-0: dispatch\nlayer 0, micro-batch 0" in text(browser, ".tooltip")
    chart = browser.find_element(By.CSS_SELECTOR, "#requests .chart")
    chart.send_keys(Keys.ARROW_LEFT)
    assert "running: " in text(browser, ".tooltip")


def test_layers_have_their_numbers_in_the_model(
    browser: webdriver.Chrome, fake: FakeServer
) -> None:
    """The first three layers have no experts, so the load's first row is of layer 3."""

    def make_state(now: float, started: float) -> dict[str, Any]:
        state = fake_state(now, started)
        state["experts"]["layers"] = [layer + 3 for layer in state["experts"]["layers"]]
        return state

    fake.make_state = make_state
    open_dashboard(browser, fake.url)
    assert "Busiest: layer 5, expert 5 with" in text(browser, "#experts")
    heat_map = browser.find_element(By.CSS_SELECTOR, "#experts canvas")
    heat_map.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert text(browser, ".tooltip").startswith("Layer 4, expert 0\n")


def test_what_is_read_of_a_step_ends_with_it(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    timeline = browser.find_element(By.CSS_SELECTOR, "#step canvas")
    timeline.send_keys(Keys.ARROW_RIGHT)
    seen = num_updates(browser)
    wait_for(browser, lambda: num_updates(browser) > seen + 1, "two updates of the same step")
    timeline.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, ".tooltip").startswith("attention-0: dispatch\n")

    def next_step(now: float, started: float) -> dict[str, Any]:
        state = fake_state(now, started)
        state["step"]["number"] += 1
        return state

    fake.make_state = next_step
    wait_for(browser, lambda: "step 78" in text(browser, "#step"), "the next step")
    assert not browser.find_element(By.CLASS_NAME, "tooltip").is_displayed()


def test_a_held_step_stays(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_dashboard(browser, fake.url)
    browser.find_element(By.XPATH, "//button[text()='Hold']").click()
    fake.make_state = lambda now, started: fake_state(now, started) | {"step": None}
    seen = num_updates(browser)
    wait_for(browser, lambda: num_updates(browser) > seen + 1, "two updates")
    assert "step 77" in text(browser, "#step")
    browser.find_element(By.XPATH, "//button[text()='Go on']").click()
    wait_for(browser, lambda: "No step yet" in text(browser, "#step"), "the new state")


def num_colours(browser: webdriver.Chrome, selector: str) -> int:
    script = """
    const canvas = document.querySelector(arguments[0]);
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const seen = new Set();
    for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 3).join());
    return seen.size;
    """
    return int(run_script(browser, script, selector))
