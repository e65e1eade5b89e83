"""Replaces generated text in a page of docs/, between two marker lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PageBlock:
    page: Path
    start: str
    end: str

    def text(self) -> str:
        """Returns the present text between the markers."""
        return self._parts()[1].strip("\n") + "\n"

    def write(self, text: str) -> None:
        before, _, after = self._parts()
        self.page.write_text(f"{before}{self.start}\n\n{text}\n{self.end}{after}", "utf-8")

    def main(self, render: Callable[[], str], about: str) -> None:
        """Runs the script's command line: prints the block, or writes it into the page."""
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--write", action="store_true", help="put it into the page")
        if parser.parse_args().write:
            self.write(render())
        else:
            print(render())

    def _parts(self) -> tuple[str, str, str]:
        before, start, rest = self.page.read_text("utf-8").partition(self.start)
        between, end, after = rest.partition(self.end)
        assert start and end, f"{self.page.name} must hold the lines {self.start} and {self.end}"
        return before, between, after
