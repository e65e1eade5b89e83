"""GET /dashboard, /dashboard/playground and their assets. They need no key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response

from moe_serve.http.pages.page_files import PAGE_FILES, PageFile

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
