"""Calls the /admin routes of a running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from moe_serve.cli.client.server_client import (
    NotReachedError,
    ServerAddress,
    ServerClient,
    refusal,
    sent_key,
)
from moe_serve.config.sources import ADMIN_KEY_VARIABLE
from moe_serve.errors import ConfigError, MoeServeError

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
    ) -> Mapping[str, Any]:
        """Returns the server's answer, which must have these fields. If the server cannot be
        reached, the command ends with exit code 1."""
        try:
            with self._client() as client:
                answer = client.request(method, f"/admin/{path}", body)
            content = answer.json()
            if answer.is_error:
                raise self.error(refusal(answer, "it gives no reason."))
            if isinstance(content, dict) and content.keys() >= fields:
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
