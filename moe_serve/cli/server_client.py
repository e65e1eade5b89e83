"""The HTTP clients of the commands that talk to a running server. Errors become sentences."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from moe_serve.config.sources import ADMIN_KEY_VARIABLE, read_first_key
from moe_serve.errors import ConfigError, MoeServeError, plain

_LONGEST = 2000  # characters of a message from the server


class NotReachedError(MoeServeError):
    """The server does not answer now. `str(error)` is one sentence."""


class ServerClient:
    """Calls one server. Close it, or use `with`."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout: httpx.Timeout | float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Raises ConfigError."""
        address = ServerAddress.parse(url, api_key)
        self.url = address.url
        self._client = httpx.Client(
            base_url=self.url,
            headers=address.headers,
            timeout=timeout,
            transport=transport,
            verify=trusted(),
            trust_env=address.uses_proxies,
        )

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def authorise(self, key: str) -> None:
        """Adds a key, which may contain any character. Requests fail if HTTP cannot carry it."""
        self._client.headers = httpx.Headers([(b"Authorization", b"Bearer " + key.encode())])

    def request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> httpx.Response:
        """Returns the answer, whatever its status. Raises NotReachedError."""
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error

    def stream(self, path: str, body: object) -> AbstractContextManager[httpx.Response]:
        """Posts a request whose answer is read piece by piece. Reading raises httpx.HTTPError."""
        return self._client.stream("POST", path, json=body)

    def unreachable(self, error: httpx.HTTPError) -> NotReachedError:
        """Returns the error in words: there is no connection, or it broke."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NotReachedError(no_connection(str(self.url), error))
        reason = str(error) or type(error).__name__
        return NotReachedError(f"the connection to {self.url} broke: {reason}.")


def refusal(response: httpx.Response, otherwise: str) -> str:
    """Returns a sentence with the status of a refused request and the server's reason."""
    try:
        reason = plain(str(response.json()["error"]["message"]), _LONGEST)
    except (ValueError, LookupError, TypeError):
        reason = otherwise
    return f"the server refused ({response.status_code}): {reason}"


_LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: httpx.URL  # without /v1
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, api_key: str | None) -> ServerAddress:
        """Parses a URL with or without /v1. Raises ConfigError."""
        try:
            parsed = parse_url(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url} is not a URL: {error}.") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url} is not a URL such as http://127.0.0.1:8000.")
        # A secret made by `echo` ends with a line break. httpx would refuse it with a message
        # that shows the whole key.
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError(
                "the API key holds a character that cannot be sent, such as a line break at the "
                "end."
            )
        return cls(parsed, {} if api_key is None else {"Authorization": f"Bearer {api_key}"})

    @property
    def uses_proxies(self) -> bool:
        """True if the environment's proxies apply: never for a server on this machine."""
        return self.url.host not in _LOOPBACK_HOSTS


def parse_url(text: str) -> httpx.URL:
    """Parses a URL and removes /v1.

    Raises httpx.InvalidURL, also for an invalid host name such as 127..0.1: httpx itself notices
    that only when it connects, and then raises UnicodeError.
    """
    url = httpx.URL(text.rstrip("/").removesuffix("/v1"))
    try:
        url.host.encode("idna")
    except UnicodeError:
        raise httpx.InvalidURL(f"{url.host} is not a host name") from None
    return url


def sent_key(text: str | None) -> str | None:
    """Returns the key; @FILE stands for the first key in that file. Raises ConfigError."""
    return read_first_key(text[1:]) if text is not None and text.startswith("@") else text


_UNVERIFIED = "CERTIFICATE_VERIFY_FAILED"  # OpenSSL's name, which httpx passes on as text


def trusted() -> ssl.SSLContext:
    """Returns the usual certificate authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR.

    These variables apply also to servers on this machine, for which the rest of the environment
    (proxies) is ignored. Raises ConfigError.
    """
    try:
        return httpx.create_ssl_context(trust_env=True)
    except OSError as error:  # ssl.SSLError is an OSError
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the authorities of SSL_CERT_FILE or SSL_CERT_DIR cannot be read: {reason}."
        ) from error


def is_distrust(error: Exception) -> bool:
    """Returns whether the server answered with a certificate that this machine does not trust."""
    return _UNVERIFIED in str(error)


def no_connection(url: str, error: Exception) -> str:
    """Returns one sentence with the reason why there is no connection."""
    if is_distrust(error):
        return (
            f"the certificate of {url} is not trusted here: set SSL_CERT_FILE to a file (PEM) of "
            "the authority that signed it."
        )
    return f"no server answers at {url}: start one with `moe-serve serve`."


Url = Annotated[str, typer.Option(help="URL of the server.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar=ADMIN_KEY_VARIABLE,
        help="Admin key of the server (one of its server.admin_keys), or @FILE with the key.",
    ),
]
URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminClient:
    """A client of the /admin routes. `error` is the exception class for a refusal."""

    url: str
    key: str | None
    error: Callable[[str], MoeServeError]

    def ask(
        self,
        method: str,
        path: str,
        fields: frozenset[str],
        body: Mapping[str, object] | None = None,
        *,
        or_fields: frozenset[str] | None = None,
    ) -> Mapping[str, Any]:
        """Returns the server's answer, which must have all of these fields or all of the other
        ones. If the server cannot be reached, the command ends with exit code 1.
        """
        try:
            with self._client() as client:
                answer = client.request(method, f"/admin/{path}", body)
            content = answer.json()
            if answer.is_error:
                raise self.error(refusal(answer, "it gives no reason."))
            forms = (fields, fields if or_fields is None else or_fields)
            if isinstance(content, dict) and any(content.keys() >= form for form in forms):
                return content
            why = f"{self.url} answers, but not like moe-serve."
        except NotReachedError as error:
            if isinstance(error.__cause__, httpx.LocalProtocolError):
                raise self.error("the admin key holds a character that cannot be sent.") from None
            why = str(error)
        except ValueError:
            why = f"{self.url} answers, but not like moe-serve."
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(1)

    def _client(self) -> ServerClient:
        try:
            ServerAddress.parse(self.url, None)
        except ConfigError:
            raise self.error(f"{self.url} is not a URL such as {URL}.") from None
        client = ServerClient(self.url, None, timeout=60.0)
        if (key := sent_key(self.key)) is not None:
            client.authorise(key)
        return client
