"""A hub of models on 127.0.0.1 with the routes that clients use, and with faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = 1 << 12  # bytes from which a file counts as large, with a SHA-256
_MODELS = "/api/models/"


@dataclass(frozen=True)
class Fault:
    """A fault of one request, in place of its answer."""

    status: int = 0  # answered instead of the file
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body, before the connection closes
    is_damaged: bool = False  # one bit of the body differs
    is_whole: bool = False  # the range is ignored
    waits_for: threading.Event | None = None  # before the body is sent


@dataclass
class FakeRepo:
    """A repository: its commits, each with the files' contents by name."""

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str]  # branch or tag: commit
    token: str | None = None  # that a client must send
    listed: list[dict[str, Any]] = field(default_factory=list)  # entries beside the real files
    hidden: dict[str, bytes] = field(default_factory=dict)  # files that are not listed

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commit = self.revisions.get(revision, revision)
        found = self.commits.get(commit)
        return None if found is None else (commit, found)


@dataclass
class FakeHub:
    """The repositories, the requests so far, and the coming faults: {file name or "api":
    faults}."""

    url: str = ""
    repos: dict[str, FakeRepo] = field(default_factory=dict)
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # (path, range)
    tokens: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file

    def add(self, repo: str, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Adds a commit and points the branch at it; returns the commit."""
        text = repr(sorted((name, hashlib.sha1(data).digest()) for name, data in files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        known = self.repos.setdefault(repo, FakeRepo({}, {}))
        known.commits[commit] = dict(files)
        known.revisions[revision] = commit
        return commit

    def fail(self, what: str, *faults: Fault) -> None:
        self.faults.setdefault(what, deque()).extend(faults)

    def fault(self, what: str) -> Fault:
        waiting = self.faults.get(what)
        return waiting.popleft() if waiting else Fault()

    def asked(self, ending: str) -> list[str]:
        """Returns the ranges of the requests whose path ends with this text."""
        return [wanted for path, wanted in self.requests if path.endswith(ending)]


@contextlib.contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        world = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def etag_of(data: bytes) -> str:
    """Returns the name that a hub gives to content: the SHA-256 of large files, git's SHA-1 of
    others."""
    if len(data) >= _LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry_of(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
    if len(data) >= _LARGE:
        entry["lfs"] = {"sha256": etag_of(data), "size": len(data), "pointerSize": 134}
    else:
        entry["blobId"] = etag_of(data)
    return entry


class _Handler(BaseHTTPRequestHandler):
    world: FakeHub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that leaves
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route(has_body=False)

    def do_GET(self) -> None:
        self._route(has_body=True)

    def _route(self, *, has_body: bool) -> None:
        path = urlsplit(self.path).path
        self.world.requests.append((path, self.headers.get("range", "")))
        self.world.tokens.append(self.headers.get("authorization", ""))
        if path.startswith(_MODELS):
            repo, _, revision = path.removeprefix(_MODELS).partition("/revision/")
            self._list(repo, unquote(revision or "main"))
            return
        repo, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        self._resolve(repo, unquote(revision), unquote(name), has_body)

    def _list(self, name: str, revision: str) -> None:
        fault = self.world.fault("api")
        if fault.status:
            self._refuse(fault.status, fault.headers)
            return
        found = self._found(name, revision)
        if found is not None:
            commit, files = found
            listed = [entry_of(each, data) for each, data in files.items()]
            listed += self.world.repos[name].listed
            body = json.dumps({"id": name, "sha": commit, "siblings": listed}).encode()
            self._head(200, {"content-type": "application/json"}, len(body))
            self.wfile.write(body)

    def _found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self.world.repos.get(name)
        if repo is None:
            self._refuse(401, {"x-error-code": "RepoNotFound"})
        elif repo.token and self.headers.get("authorization") != f"Bearer {repo.token}":
            self._refuse(401, {"x-error-code": "GatedRepo"})
        elif (found := repo.files(revision)) is None:
            self._refuse(404, {"x-error-code": "RevisionNotFound"})
        else:
            return found
        return None

    def _resolve(self, repo: str, revision: str, name: str, has_body: bool) -> None:
        fault = self.world.fault(name)
        if fault.status:
            self._refuse(fault.status, fault.headers)
            return
        found = self._found(repo, revision)
        if found is None:
            return
        commit, files = found[0], {**found[1], **self.world.repos[repo].hidden}
        if name not in files:
            self._refuse(404, {"x-error-code": "EntryNotFound"})
            return
        self._send(commit, name, files[name], fault, has_body)

    def _send(self, commit: str, name: str, data: bytes, fault: Fault, has_body: bool) -> None:
        wanted = "" if fault.is_whole else self.headers.get("range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
        if wanted and start >= len(data):
            self._refuse(416, {"content-range": f"bytes */{len(data)}"})
            return
        headers = {"x-repo-commit": commit, "etag": f'"{etag_of(data)}"', "accept-ranges": "bytes"}
        headers["x-linked-size"] = str(len(data))
        if wanted:
            headers["content-range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        body = data[start:]
        if fault.is_damaged:
            body = bytes([body[0] ^ 1]) + body[1:]
        self._head(206 if wanted else 200, headers, len(body))
        if not has_body:
            return
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
            self.close_connection = True
        self.wfile.write(body)
        self.wfile.flush()
        self.world.sent[name] = self.world.sent.get(name, 0) + len(body)
        if fault.waits_for is not None:
            fault.waits_for.wait(60)

    def _refuse(self, status: int, headers: Mapping[str, str]) -> None:
        self._head(status, headers, 0)

    def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(length))
        self.end_headers()
