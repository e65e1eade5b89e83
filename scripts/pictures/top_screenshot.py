"""Draws docs/images/top.png: `moe-serve top` with a busy server, as a terminal would show it.

    PYTHONPATH=scripts python -m pictures.top_screenshot [--port 8170] [--out docs/images/top.png]

Starts the demonstration model with two attention and two expert ranks, sends it chats for a while,
and renders a frame of `top` as a picture with Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from moe_serve.cli.server_client import NotReachedError
from moe_serve.cli.top.top_source import TopSource
from moe_serve.cli.top.top_view import frame

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "images" / "top.png"
COLUMNS, SCALE = 140, 1.0
TOPICS = ("a bell", "17 + 25", "the king of a small town", "a list of fruits", "def add(a, b):")
_START_S, _CLIENTS = 300.0, 12


@contextlib.contextmanager
def server(port: int) -> Iterator[str]:
    """Yields the URL of the server when it is ready."""
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moe_serve", "serve", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--attention-ranks", "2", "--expert-ranks", "2"], stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + _START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                sys.exit("the server did not start")
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health/ready", timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False


def chat(url: str, is_over: threading.Event, number: int) -> None:
    """Runs one client that sends one chat after another."""
    turn = number
    while not is_over.is_set():
        text = f"Tell me about {TOPICS[turn % len(TOPICS)]}."
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 96, "seed": turn}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            data=json.dumps({**body, "ignore_eos": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        turn += 1


def draw(url: str) -> str:
    """Returns the frame as SVG with the machine's fonts, so nothing is downloaded."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    with TopSource(url, None) as source:
        console.print(frame(source.fetch(), console, is_bounded=False))
    svg = console.export_svg(title="moe-serve top", font_aspect_ratio=0.61)
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def photograph(svg: str, file: Path) -> None:
    """Renders the SVG with a headless Chromium, in the size of the picture."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium here: install it")
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None, "the SVG has no viewBox"
    width, height = (round(float(number)) for number in size.groups())
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "top.html"
        page.write_text(f"<body style='margin:0;background:#292929'>{svg}</body>", "utf-8")
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
            f"--force-device-scale-factor={SCALE}",
            f"--window-size={width},{height}",
            f"--screenshot={file}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8170)
    parser.add_argument("--seconds", type=float, default=25.0, help="of work before the picture")
    parser.add_argument("--out", type=Path, default=FILE)
    chosen = parser.parse_args()
    with server(chosen.port) as url:
        is_over = threading.Event()
        clients = [
            threading.Thread(target=chat, args=(url, is_over, number)) for number in range(_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            time.sleep(chosen.seconds)
            svg = draw(url)
        except NotReachedError as error:
            sys.exit(str(error))
        finally:
            is_over.set()
            for client in clients:
                client.join()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    photograph(svg, chosen.out.resolve())
    print(f"{chosen.out}: {chosen.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
