"""The files of the dashboard and the playground, read once when the server starts.

A request can only name a key of this table: no path from outside reaches the file system. The pages
contain no data, so they need no API key; they read data from routes that do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PREFIX = "/dashboard"
_PAGES: Mapping[str, str] = {PREFIX: "dashboard.html", f"{PREFIX}/playground": "playground.html"}
_MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """A file that is ready to be sent."""

    content: bytes
    media_type: str
    etag: str


def read_page_files() -> dict[str, PageFile]:
    """Reads every page and asset, by the path that it is served under."""
    assets = [path for path in sorted(FOLDER.rglob("*")) if path.suffix in (".css", ".js", ".svg")]
    served = {route: FOLDER / name for route, name in _PAGES.items()}
    served |= {f"{PREFIX}/assets/{path.relative_to(FOLDER)}": path for path in assets}
    return {route: _read(path) for route, path in served.items()}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content=content, media_type=_MEDIA_TYPES[path.suffix], etag=f'"{digest}"')


PAGE_FILES: Mapping[str, PageFile] = read_page_files()
