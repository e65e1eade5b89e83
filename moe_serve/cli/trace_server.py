"""`moe-serve trace start`, `stop` and `status`: recordings of a server that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moe_serve.config_sources import ADMIN_KEY_VARIABLE, read_secret_file
from moe_serve.errors import TracingError

Url = Annotated[str, typer.Option(help="Where the server is.")]
AdminKey = Annotated[
    str | None,
    typer.Option(
        envvar=ADMIN_KEY_VARIABLE, help="One of its server.admin_keys, or @FILE that holds it."
    ),
]
_URL = "http://127.0.0.1:8000"
_FIELDS = {"is_recording", "folder", "sample_rate", "recording", "total"}  # of every answer


def start(
    url: Url = _URL,
    admin_key: AdminKey = None,
    sample_rate: Annotated[
        float | None,
        typer.Option(help="Share of requests to record.", show_default="trace.sample_rate"),
    ] = None,
    weights: Annotated[
        bool | None,
        typer.Option(help="Also the routers' weights.", show_default="trace.weights"),
    ] = None,
) -> None:
    """Begin to record the routing of a running server, into a folder of its trace.directory."""
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise TracingError(f"--sample-rate {sample_rate:g} is no share: it is above 0, at most 1.")
    given = {"sample_rate": sample_rate, "weights": weights}
    body = {name: value for name, value in given.items() if value is not None}
    _print(_ask(url, admin_key, "POST", "start", body))


def stop(url: Url = _URL, admin_key: AdminKey = None) -> None:
    """End the recording; what was not written yet is."""
    _print(_ask(url, admin_key, "POST", "stop"))


def status(url: Url = _URL, admin_key: AdminKey = None) -> None:
    """What is being recorded, and how much of it there is."""
    _print(_ask(url, admin_key, "GET", "status"))


def _ask(
    url: str, key: str | None, method: str, verb: str, body: Mapping[str, object] | None = None
) -> Mapping[str, Any]:
    """The server's answer. Not reached: exit code 1; refused: TracingError."""
    import httpx

    if key is not None and key.startswith("@"):
        key = read_secret_file(key[1:])[0]
    headers = [] if key is None else [(b"Authorization", f"Bearer {key}".encode())]
    try:
        base = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        is_local = base.host in ("127.0.0.1", "localhost", "::1")
        with httpx.Client(headers=headers, timeout=60.0, trust_env=not is_local) as client:
            path = f"{str(base).rstrip('/')}/admin/trace/{verb}"
            answer = client.request(method, path, json=body if method == "POST" else None)
        content = answer.json()
        if answer.is_error:
            raise TracingError(f"the server refused ({answer.status_code}): {_message(content)}")
        if isinstance(content, dict) and content.keys() >= _FIELDS:
            return content
        why = f"{url} answers, but not like moe-serve."
    except (httpx.ConnectError, httpx.ConnectTimeout):
        why = f"no server answers at {url}: start one with `moe-serve serve`."
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise TracingError(f"{url} is not a URL such as {_URL}.") from None
    except httpx.LocalProtocolError:
        raise TracingError("the admin key holds a character that cannot be sent.") from None
    except httpx.HTTPError as error:
        why = f"the connection to {url} broke: {str(error) or type(error).__name__}."
    except ValueError:
        why = f"{url} answers, but not like moe-serve."
    typer.echo(f"error: {why}", err=True)
    raise typer.Exit(1)


def _message(content: Any) -> str:
    try:
        return str(content["error"]["message"])
    except (LookupError, TypeError):
        return "it does not say why."


def _print(status: Mapping[str, Any]) -> None:
    recording, total = status["recording"], status["total"]
    table = Table.grid(padding=(0, 2))
    table.add_row("recording", "yes" if status["is_recording"] else "no")
    if status["folder"] is not None:
        kept = [word for word in ("weights", "tokens") if status[f"has_{word}"]]
        table.add_row("folder", status["folder"])
        table.add_row("of", f"{100 * status['sample_rate']:.4g}% of the requests")
        table.add_row("with", " and ".join(["expert ids", *kept]))
        table.add_row("tokens", f"{recording['num_tokens']} (in all {total['num_tokens']})")
        table.add_row("written", f"{recording['num_written_bytes'] / 2**20:.3g} MiB")
        dropped = recording["num_dropped_parts"]
        table.add_row("files", f"{recording['num_parts']}, {dropped} older ones were dropped")
    if recording["num_lost_tokens"]:
        table.add_row("lost", f"{recording['num_lost_tokens']} tokens that the disk did not take")
    if recording["failure"]:
        table.add_row("failed", recording["failure"])
    Console(highlight=False, soft_wrap=True).print(table)
