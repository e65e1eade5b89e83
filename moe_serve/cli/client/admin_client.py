"""Calls the /admin routes of a running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moe_serve.bench.client.plain_text import plain
from moe_serve.config.sources import ADMIN_KEY_VARIABLE, read_first_key
from moe_serve.errors import MoeServeError

Url = Annotated[str, typer.Option(help="URL of the server.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar=ADMIN_KEY_VARIABLE,
        help="Admin key of the server (one of its server.admin_keys), or @FILE with the key.",
    ),
]
URL = "http://127.0.0.1:8000"
_LONGEST = 2000  # characters of a message from the server


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
    ) -> Mapping[str, Any]:
        """Returns the server's answer, which must have these fields. If the server cannot be
        reached, the command ends with exit code 1."""
        import httpx

        from moe_serve.cli.client.server_address import no_connection, parse_url, trusted

        try:
            base = parse_url(self.url)
            is_local = base.host in ("127.0.0.1", "localhost", "::1")
            with httpx.Client(
                headers=self._headers(), timeout=60.0, verify=trusted(), trust_env=not is_local
            ) as client:
                where = f"{str(base).rstrip('/')}/admin/{path}"
                answer = client.request(method, where, json=body if method == "POST" else None)
            content = answer.json()
            if answer.is_error:
                raise self.error(f"the server refused ({answer.status_code}): {_message(content)}")
            if isinstance(content, dict) and content.keys() >= fields:
                return content
            why = f"{self.url} answers, but not like moe-serve."
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            why = no_connection(self.url, error)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise self.error(f"{self.url} is not a URL such as {URL}.") from None
        except httpx.LocalProtocolError:
            raise self.error("the admin key holds a character that cannot be sent.") from None
        except httpx.HTTPError as error:
            why = f"the connection to {self.url} broke: {str(error) or type(error).__name__}."
        except ValueError:
            why = f"{self.url} answers, but not like moe-serve."
        typer.echo(f"error: {why}", err=True)
        raise typer.Exit(1)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        key = self.key
        if key is not None and key.startswith("@"):
            key = read_first_key(key[1:])
        return [] if key is None else [(b"Authorization", f"Bearer {key}".encode())]


def _message(content: Any) -> str:
    try:
        return plain(str(content["error"]["message"]), _LONGEST)
    except (LookupError, TypeError):
        return "it gives no reason."
