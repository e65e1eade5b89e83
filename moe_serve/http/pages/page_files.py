"""The files of the dashboard and the playground, read once when the server starts.

A request can only name a key of this table: no path from outside reaches the file system. The pages
contain no data, so they need no API key; they read data from routes that do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

FOLDER = Path(__file__).parent
PREFIX = "/dashboard"
_PAGES: Mapping[str, str] = {PREFIX: "dashboard.html", f"{PREFIX}/playground": "playground.html"}
_MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Forbids content from other hosts, inline scripts and styles, frames around the page, and text that
# becomes markup (Trusted Types, in browsers that support them).
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    # browsers revalidate each time and usually get 304, so a page is never stale
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
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


def add_page_routes(app: FastAPI) -> None:
    """Adds one route for each file. They are not part of the OpenAPI schema."""
    for path, file in PAGE_FILES.items():
        app.add_route(path, _sender(file), methods=["GET", "HEAD"], include_in_schema=False)


def _sender(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def send_file(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    return send_file
