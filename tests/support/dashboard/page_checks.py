"""Checks that tests make on a page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60


def wait_for(browser: webdriver.Chrome, condition: Callable[[], Any], what: str) -> Any:
    return WebDriverWait(browser, WAIT_S, 0.05).until(lambda _: condition(), f"in vain: {what}")


def open_dashboard(browser: webdriver.Chrome, url: str) -> None:
    browser.get(f"{url}/dashboard")
    wait_for(browser, lambda: num_updates(browser) > 0, "the first state")


def num_updates(browser: webdriver.Chrome) -> int:
    return int(browser.find_element(By.TAG_NAME, "body").get_attribute("data-updates") or 0)


def text(browser: webdriver.Chrome, selector: str) -> str:
    """Reads an element's text by script, because the page may replace a node between finding and
    reading it."""
    script = "return document.querySelector(arguments[0])?.innerText ?? ''"
    return str(browser.execute_script(script, selector))


def status(browser: webdriver.Chrome) -> str:
    return text(browser, "#status")


def run_script(browser: webdriver.Chrome, script: str, *arguments: object) -> Any:
    return browser.execute_script(script, *arguments)


# The colours of every piece of text that can be seen, with what lies behind it.
CONTRASTS = """
const parse = (text) => {
  const probe = document.createElement("canvas");
  probe.width = probe.height = 1;
  const pen = probe.getContext("2d", { willReadFrequently: true });
  pen.fillStyle = text;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
const light = (rgb) => rgb.map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  const layers = [];
  for (let at = node; at; at = at.parentElement) {
    layers.push(parse(getComputedStyle(at).backgroundColor));
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  const isSvg = node instanceof SVGElement;
  if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
  const style = getComputedStyle(node);
  const back = behind(isSvg ? node.closest(".chart") : node);
  const front = over(parse(isSvg ? style.fill : style.color), back);
  const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 30)]);
}
return found;
"""


def contrasts(browser: webdriver.Chrome) -> list[tuple[float, str]]:
    return [(ratio, words) for ratio, words in run_script(browser, CONTRASTS)]


def overflow(browser: webdriver.Chrome) -> list[str]:
    """Returns elements that extend beyond the right edge of the page, unless a box of their own
    scrolls them."""
    script = """
    const width = document.documentElement.clientWidth;
    return [...document.querySelectorAll("body *")]
      .filter((node) => node.getBoundingClientRect().right > width + 1)
      .filter((node) => !node.closest(".scroller, .hidden, svg"))
      .map((node) => `${node.tagName} ${node.className} ${node.getBoundingClientRect().right}`);
    """
    return list(run_script(browser, script))
