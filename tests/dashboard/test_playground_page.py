"""The playground in a real browser: a chat whose tokens show their experts."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import HTTPException
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from pictures.headless_chromium import console_errors, requested_urls, set_view
from tests.support.dashboard.fake_server import ANSWER, DRAFTED, FakeServer, experts_of
from tests.support.dashboard.fake_state import NUM_LAYERS, fake_state
from tests.support.dashboard.page_checks import (
    contrasts,
    overflow,
    run_script,
    status,
    text,
    wait_for,
)


def open_playground(browser: webdriver.Chrome, fake: FakeServer) -> None:
    browser.get(f"{fake.url}/dashboard/playground")
    wait_for(browser, lambda: status(browser) == "made-up", "the model's name")


def say(browser: webdriver.Chrome, words: str) -> None:
    browser.find_element(By.ID, "prompt").send_keys(words, Keys.ENTER)


def wait_for_end(browser: webdriver.Chrome, how: str = "stop") -> None:
    figures = ".turn.assistant:last-child .figures"
    wait_for(browser, lambda: f"ended: {how}" in text(browser, figures), f"the end by {how}")


def tokens(browser: webdriver.Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('.token')].map((node) => node.textContent)"
    return list(run_script(browser, script))


def test_each_token_shows_its_experts(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_playground(browser, fake)
    say(browser, "Tell me")
    wait_for_end(browser)
    assert fake.bodies[0]["return_routed_experts"] is True
    assert text(browser, ".turn.assistant .said") == "The king·é sat <b>down</b>."
    assert tokens(browser) == ["The", " king", "·", "é", " sat", " <b>down", "</b>."]
    assert len(tokens(browser)) == len(ANSWER)
    spans = browser.find_elements(By.CLASS_NAME, "token")
    drafted = [i for i, span in enumerate(spans) if "drafted" in span.get_attribute("class")]
    assert tuple(drafted) == DRAFTED
    assert f"{len(DRAFTED)} drafted" in text(browser, ".turn.assistant .figures")
    ActionChains(browser).move_to_element(spans[4]).perform()
    assert "Token 5" in text(browser, "#token")
    words = text(browser, ".tooltip")
    assert "drafted (suffix)" in words
    for layer, ids in enumerate(experts_of(4)):
        assert f"layer {layer}: {ids[0]}, {ids[1]}" in words
    assert "50% of its experts in common with the previous token" in words
    assert "7 tokens chose 5.0 of 16 experts" in text(browser, "#answer")
    assert console_errors(browser) == []
    hosts = {urlsplit(url).netloc for url in requested_urls(browser) if url.startswith("http")}
    assert hosts == {urlsplit(fake.url).netloc}


def test_control_characters_are_shown_and_turn_nothing_round(
    browser: webdriver.Chrome, fake: FakeServer
) -> None:
    pieces = ["run ", "\u202egpj", ".exe", "\x07\u200b\r", "\n", "שלום", " עולם", "\u2066x"]
    fake.answer = [(piece, piece) for piece in pieces]
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    assert tokens(browser) == [
        "run ", "⟨U+202E⟩gpj", ".exe", "⟨U+0007⟩⟨U+200B⟩⟨U+000D⟩", "\n", "שלום", " עולם",
        "⟨U+2066⟩x",
    ]  # fmt: skip
    places = (
        "return [...document.querySelectorAll('.token')].map((n) => n.getBoundingClientRect().x)"
    )
    at = run_script(browser, places)
    assert at[0] < at[1] < at[2] < at[3], "in the order in which they came"
    assert at[6] < at[5], "and Hebrew still reads from the right"
    browser.find_elements(By.CLASS_NAME, "token")[1].click()
    assert '"⟨U+202E⟩gpj"' in text(browser, "#token")
    assert '"⟨U+202E⟩gpj"' in text(browser, ".tooltip")
    say(browser, "and")
    wait_for(browser, lambda: len(fake.bodies) == 2, "the second question")
    assert fake.bodies[1]["messages"][1]["content"] == "".join(pieces), "sent back as it was"


def test_the_keyboard_walks_over_tokens(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    first = browser.find_element(By.CSS_SELECTOR, ".token[tabindex='0']")
    first.send_keys(Keys.ARROW_RIGHT)
    assert text(browser, ".token[aria-selected='true']") == " king"
    browser.switch_to.active_element.send_keys(Keys.END)
    assert "Token 7" in text(browser, "#token")
    canvas = browser.find_element(By.CSS_SELECTOR, "#token canvas")
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    expected = "Layer 0, expert 3\nchosen by this token\nchosen 3 times so far"
    assert expected in text(browser, ".tooltip")


def test_tokens_are_coloured(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    script = "return [...document.querySelectorAll('.token')].map((n) => n.style.background)"
    by_similarity = run_script(browser, script)
    assert by_similarity[0] == "" and by_similarity[1] == by_similarity[3] != by_similarity[2]
    grid = browser.find_element(By.CSS_SELECTOR, "#answer canvas")
    grid.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ENTER)
    chosen = "return [...document.querySelectorAll('.token')].map((n) => n.matches('.chose'))"
    assert run_script(browser, chosen) == [2 in experts_of(i)[1] for i in range(7)]
    browser.find_element(By.ID, "layer").send_keys(Keys.BACKSPACE, "5")
    browser.find_element(By.ID, "expert").send_keys(Keys.BACKSPACE, "7")
    assert run_script(browser, chosen) == [7 in experts_of(i)[5] for i in range(7)]
    assert any(run_script(browser, chosen))


def test_layers_have_their_numbers_in_the_model(
    browser: webdriver.Chrome, fake: FakeServer
) -> None:
    """The first layers of this model, and every second one, are dense and choose no experts."""

    def state(now: float, started: float) -> dict[str, Any]:
        made = fake_state(now, started)
        made["experts"]["layers"] = [3 + 2 * row for row in range(NUM_LAYERS)]
        return made

    fake.make_state = state
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    browser.find_elements(By.CLASS_NAME, "token")[4].click()
    words = text(browser, ".tooltip")
    for row, ids in enumerate(experts_of(4)):
        assert f"layer {3 + 2 * row}: {ids[0]}, {ids[1]}" in words
    grid = browser.find_element(By.CSS_SELECTOR, "#answer canvas")
    grid.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "Layer 5, expert 2" in text(browser, ".tooltip")
    grid.send_keys(Keys.ENTER)
    chosen = "return [...document.querySelectorAll('.token')].map((n) => n.matches('.chose'))"
    assert run_script(browser, chosen) == [2 in experts_of(i)[1] for i in range(7)]
    field = browser.find_element(By.ID, "layer")
    assert field.get_attribute("value") == "5"
    field.send_keys(Keys.BACKSPACE)
    assert field.get_attribute("placeholder") == "3"
    assert run_script(browser, chosen) == [2 in experts_of(i)[0] for i in range(7)]
    field.send_keys("7")
    assert run_script(browser, chosen) == [2 in experts_of(i)[2] for i in range(7)]
    field.send_keys(Keys.BACKSPACE, "4")
    assert not any(run_script(browser, chosen)), "a layer without experts"
    assert console_errors(browser) == []


def test_turns_settings_and_errors(browser: webdriver.Chrome, fake: FakeServer) -> None:
    open_playground(browser, fake)
    browser.find_element(By.CSS_SELECTOR, ".settings summary").click()
    browser.find_element(By.ID, "system").send_keys("Be brief.")
    assert "temperature 0.7 · at most 128 tokens · system prompt" in text(browser, ".settings")
    say(browser, "one")
    wait_for_end(browser)
    field = browser.find_element(By.ID, "temperature")
    run_script(browser, "arguments[0].value = '9'", field)
    say(browser, "two")
    wait_for(browser, lambda: "must be in [0, 2]" in text(browser, ".failed"), "the error")
    run_script(browser, "arguments[0].value = '0'", field)
    say(browser, "three")
    wait_for_end(browser)
    answer = "The kingé sat <b>down</b>."
    assert fake.bodies[2]["temperature"] == 0 and fake.bodies[2]["max_tokens"] == 128
    assert [(m["role"], m["content"]) for m in fake.bodies[2]["messages"]] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", answer),
        ("user", "three"),
    ]
    browser.find_element(By.ID, "clear").click()
    assert "Talk to the model" in text(browser, "#turns")
    assert [e for e in console_errors(browser) if "400" not in e] == []


def test_stop(browser: webdriver.Chrome, fake: FakeServer) -> None:
    fake.token_pause_s = 10.0
    open_playground(browser, fake)
    say(browser, "slowly")
    wait_for(browser, lambda: tokens(browser), "the first token")
    browser.find_element(By.ID, "stop").click()
    wait_for_end(browser, "stopped")
    assert len(tokens(browser)) < len(ANSWER)
    assert browser.find_element(By.ID, "send").is_enabled()
    assert console_errors(browser) == []


def loading(now: float, started: float) -> dict[str, Any]:
    raise HTTPException(503)


def test_a_server_without_experts_and_one_that_goes(
    browser: webdriver.Chrome, fake: FakeServer
) -> None:
    fake.has_experts = False
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    assert text(browser, ".turn.assistant .said") == "The kingé sat <b>down</b>."
    assert "experts were not sent" in text(browser, ".figures")
    fake.token_pause_s = 10.0
    say(browser, "again")
    said = ".turn.assistant:last-child .said"
    wait_for(browser, lambda: "The" in text(browser, said), "some text")
    fake.stop()
    wait_for(
        browser,
        lambda: "connection to the server was lost" in text(browser, ".failed"),
        "the error in words",
    )
    wait_for(browser, lambda: "no answer" in status(browser), "the line above says so too")
    fake.make_state, fake.token_pause_s = loading, 0.0
    fake.start()
    wait_for(browser, lambda: "answered 503" in status(browser), "it loads")
    fake.make_state = fake_state
    wait_for(browser, lambda: status(browser) == "made-up", "it is back")
    say(browser, "and now")
    wait_for_end(browser)


def test_a_key_is_asked_for(browser: webdriver.Chrome, fake: FakeServer) -> None:
    fake.keys = ("one",)
    browser.get(f"{fake.url}/dashboard/playground")
    wait_for(browser, lambda: browser.find_elements(By.ID, "api-key"), "the question")
    browser.find_element(By.ID, "api-key").send_keys("one", Keys.ENTER)
    wait_for(browser, lambda: status(browser) == "made-up", "the state")
    fake.keys = ("two",)
    say(browser, "hi")
    wait_for(browser, lambda: browser.find_elements(By.ID, "api-key"), "the second question")
    browser.find_element(By.ID, "api-key").send_keys("two", Keys.ENTER)
    wait_for_end(browser)
    assert len(browser.find_elements(By.CSS_SELECTOR, ".turn.assistant")) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable(
    browser: webdriver.Chrome, fake: FakeServer, width: int, theme: str
) -> None:
    set_view(browser, width, 900, theme)
    open_playground(browser, fake)
    say(browser, "hi")
    wait_for_end(browser)
    assert run_script(browser, "return document.documentElement.scrollWidth") == width
    assert overflow(browser) == []
    found = contrasts(browser)
    assert len(found) > 20
    assert [item for item in found if item[0] < 4.5] == []
