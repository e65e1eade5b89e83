"""Takes the picture of a bench report for docs/guide/bench.md, from a real server and Chromium.

    PYTHONPATH=scripts python -m pictures.bench_screenshot [PORT]

Writes docs/images/bench-report.png. Has the requirements of `screenshots.py`; takes about a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pictures.headless_chromium import set_view
from pictures.screenshots import IMAGES, MAX_BYTES, ROOT, chromium, serving

LOAD = ("--rate", "6", "--requests", "150", "--prompt-tokens", "64", "--output-tokens", "16:64")
LIMITS = ("--slo", "ttft=500ms,tpot=60ms")


def main(port: int) -> int:
    path = IMAGES / "bench-report.png"
    with tempfile.TemporaryDirectory() as folder, serving(port) as url, chromium() as browser:
        report = Path(folder) / "report.html"
        command = [sys.executable, "-m", "moe_serve", "bench", "--url", url, *LOAD, *LIMITS]
        subprocess.run([*command, "--html", str(report)], cwd=ROOT, check=True)
        set_view(browser, 1280, 900, "light")
        browser.get(report.as_uri())
        height = int(browser.execute_script("return document.documentElement.scrollHeight"))
        set_view(browser, 1280, min(height, 1800), "light")
        browser.save_screenshot(str(path))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")
    return 1 if path.stat().st_size > MAX_BYTES else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8151))
