"""Asks a hub for the files of a model, and turns its refusals into sentences."""

from __future__ import annotations

import contextlib
import functools
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import quote

import httpx

from moe_serve import __version__
from moe_serve.errors import HubError, HubUnreachableError, plain
from moe_serve.json_text import parse_json
from moe_serve.model.hub.hub_name import HubName
from moe_serve.model.hub.hub_settings import HubSettings
from moe_serve.model.hub.repo_files import RepoFile, RepoListing

_BUSY = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_WAIT_S = 120.0  # longest wait, regardless of Retry-After
_MOST_LISTING_BYTES = 64 << 20


class TransientError(Exception):
    """An attempt failed, and a later one may succeed."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Attempts:
    """Counts failed attempts. Waits longer after each of them, and gives up after the last."""

    def __init__(self, settings: HubSettings, stop: threading.Event) -> None:
        self._waits, self._stop, self._num_failed = settings.retry_waits_s, stop, 0
        self._endpoint = settings.endpoint

    def progressed(self) -> None:
        self._num_failed = 0

    def failed(self, error: TransientError, what: str) -> None:
        """Waits for the next attempt. Raises HubUnreachableError after the last one."""
        if self._num_failed >= len(self._waits):
            times = "1 attempt" if self._num_failed == 0 else f"{self._num_failed + 1} attempts"
            raise HubUnreachableError(
                f"{what} cannot be fetched from {self._endpoint} after {times}: {error}; try "
                "again later."
            ) from error
        wait_s = min(max(self._waits[self._num_failed], error.retry_after_s), _LONGEST_WAIT_S)
        self._num_failed += 1
        if self._stop.wait(wait_s):
            raise HubError(f"{what} is no longer fetched.")


class HubClient:
    """The connections to a hub. Several threads may use them; `stop` ends their waits."""

    def __init__(self, settings: HubSettings, stop: threading.Event) -> None:
        self.settings, self.stop = settings, stop
        headers = {"user-agent": f"moe-serve/{__version__}", "accept-encoding": "identity"}
        if settings.token is not None:
            headers["authorization"] = f"Bearer {settings.token}"
        # httpx drops the token where a redirect leads to another host.
        try:
            self._http = httpx.Client(
                headers=headers,
                timeout=settings.timeout_s,
                follow_redirects=True,
                verify=_certificates(),
            )
        except (ValueError, TypeError) as error:  # a header with a line end, a proxy without a URL
            raise HubError(f"the hub cannot be asked: {plain(str(error))}.") from None

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def listing(self, name: HubName, *, is_patient: bool = True) -> RepoListing:
        """Fetches the commit and the files of a revision. Raises HubError, and HubUnreachableError
        after the last attempt (`is_patient` False: after the first)."""
        attempts = Attempts(self.settings, self.stop)
        url = (
            f"{self.settings.endpoint}/api/models/{name.repo}/revision/"
            f"{quote(name.revision, safe='')}"
        )
        while True:
            try:
                with self._answer(url, name, {}, params={"blobs": "true"}) as response:
                    return RepoListing.parse(name, self._json(response))
            except TransientError as error:
                if not is_patient:
                    raise HubUnreachableError(
                        f"{self.settings.endpoint} cannot be reached: {error}."
                    ) from error
                attempts.failed(error, f"the list of files of {name}")

    @contextlib.contextmanager
    def pieces(self, name: HubName, file: RepoFile, start: int) -> Iterator[Iterator[bytes]]:
        """Opens the bytes of a file from `start` on. `name` has the commit.

        Raises HubError if the hub has a file of another size, and TransientError, also while the
        bytes are read.
        """
        url = (
            f"{self.settings.endpoint}/{name.repo}/resolve/{name.revision}/"
            f"{quote(file.name, safe='')}"
        )
        wanted = {"range": f"bytes={start}-"} if start else {}
        with self._answer(url, name, wanted, what=file.name) as response:
            begin, total = _extent(response)
            if total is not None and total != file.size or begin not in (0, start):
                raise HubError(
                    f"{self.settings.endpoint} sends bytes {begin} to {total} of {file.name} of "
                    f"{name.repo}, but lists the file with {file.size} bytes: the hub or a proxy "
                    "before it is broken."
                )
            yield _skipped(self._raw(response), start - begin)

    @contextlib.contextmanager
    def _answer(
        self,
        url: str,
        name: HubName,
        headers: dict[str, str],
        *,
        what: str = "",
        params: dict[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        try:
            with self._http.stream("GET", url, headers=headers, params=params) as response:
                if not response.is_success:
                    raise _refusal(response, self.settings, name, what)
                yield response
        except httpx.TransportError as error:
            raise TransientError(plain(str(error)) or type(error).__name__) from error
        except (httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise HubError(
                f"the request to the hub {self.settings.endpoint} failed: {error}."
            ) from error

    def _raw(self, response: httpx.Response) -> Iterator[bytes]:
        for piece in response.iter_raw():  # as they arrive: a size would hold bytes back
            if self.stop.is_set():
                raise HubError("the download is no longer wanted.")
            yield piece

    def _json(self, response: httpx.Response) -> object:
        text = bytearray()
        for piece in self._raw(response):
            text += piece
            if len(text) > _MOST_LISTING_BYTES:
                raise HubError(
                    f"{self.settings.endpoint} lists files in more than {_MOST_LISTING_BYTES} "
                    "bytes: it is not a hub of models."
                )
        try:
            return parse_json(bytes(text))
        except (ValueError, RecursionError):
            raise HubError(
                f"{self.settings.endpoint} answers without JSON "
                f"({plain(text.decode(errors='replace'), 60)!r}): HF_ENDPOINT must be the address "
                "of a hub of models."
            ) from None


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reads the certificates of authorities once, as that takes a tenth of a second."""
    return httpx.create_ssl_context()


def _extent(response: httpx.Response) -> tuple[int, int | None]:
    """Returns the first byte that an answer sends, and the size of the whole file if it says so."""
    try:
        if response.status_code == 206:
            sent, _, total = response.headers["content-range"].removeprefix("bytes ").partition("/")
            return int(sent.partition("-")[0]), int(total)
        length = response.headers.get("content-length")
        return 0, None if length is None else int(length)
    except (KeyError, ValueError):
        raise TransientError("an answer has a malformed length") from None


def _skipped(pieces: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """Yields the bytes after the first `num_bytes`: a server may ignore where to start."""
    for piece in pieces:
        if num_bytes < len(piece):
            yield piece[num_bytes:]
        num_bytes = max(0, num_bytes - len(piece))


def _refusal(
    response: httpx.Response, settings: HubSettings, name: HubName, what: str
) -> Exception:
    """Returns the error of an answer that is not a success."""
    status, where = response.status_code, settings.endpoint
    code = response.headers.get("x-error-code", "")
    if status in _BUSY:
        after = response.headers.get("retry-after", "")
        wait_s = float(after) if after.isascii() and after.isdigit() else 0.0
        return TransientError(f"it answers HTTP {status}", wait_s)
    if status == 403 or code == "GatedRepo":
        token = "the token does not allow it" if settings.token else "it needs a token"
        return HubError(
            f"{where} does not give out {name} (HTTP {status}): {token}; accept the model's terms "
            f"at {where}/{name.repo}, and set HF_TOKEN to a token of that account (or run `hf auth "
            "login`)."
        )
    if status == 401:
        token = "does not accept the token for" if settings.token else "needs a token for"
        return HubError(
            f"{where} {token} {name} (HTTP 401): the model is gated, private, or does not exist; "
            f"check the name, accept the terms at {where}/{name.repo}, and set HF_TOKEN (or run "
            "`hf auth login`)."
        )
    if status == 404 and (what or code == "EntryNotFound"):
        return HubError(
            f"{where} lists the file {what} of {name}, but does not have it (HTTP 404)."
        )
    if status == 404 and code == "RevisionNotFound":
        return HubError(
            f"{name.repo} has no revision {name.revision!r} at {where} (HTTP 404): give a branch, "
            "a tag or a commit after the @."
        )
    if status == 404:
        return HubError(
            f"{where} has no model {name.repo} (HTTP 404): check the owner and the name; a private "
            "model needs HF_TOKEN."
        )
    return HubError(f"{where} answers HTTP {status} for {what or name}.")
