"""Shows what `moe-serve serve` does while it loads, and the ready message."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from moe_serve import __version__
from moe_serve.config.sources import API_KEY_VARIABLE

WILDCARD_HOSTS = {
    "0.0.0.0": "127.0.0.1",
    "::": "::1",
}  # address that the server listens on -> address at which this machine reaches it


@contextlib.contextmanager
def loading_bar(console: Console) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback (tensors read, tensors in all) that draws a bar; None without a
    terminal."""
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("loading"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tensors"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def server_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """Returns the URL at which a client on this machine reaches the server."""
    host, scheme = WILDCARD_HOSTS.get(host, host), "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def curl_line(url: str, model: str, *, needs_key: bool) -> str:
    """Returns a curl command that works when it is pasted into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me a short story."}]}
    parts = [f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'"]
    if needs_key:
        parts.append(f'-H "Authorization: Bearer ${API_KEY_VARIABLE}"')
    parts.append(f"-d {shlex.quote(json.dumps(body))}")
    return " ".join(parts)


def chat_line(url: str) -> str:
    """Returns a `moe-serve chat` command, with the path of the program if it is not on PATH."""
    program = Path(sys.argv[0])
    is_hidden = program.name == "moe-serve" and shutil.which("moe-serve") is None
    return f"{shlex.quote(str(program)) if is_hidden else 'moe-serve'} chat --url {url}"


def print_ready(console: Console, url: str, rows: Mapping[str, str], curl: str) -> None:
    """Prints the ready message: URL, model, layout, cache, and commands to paste, never wrapped."""
    title = Text(f"moe-serve {__version__} is ready at {url}", style="bold")
    lines = [Text.assemble((f"  {name:<7} ", "dim"), value) for name, value in rows.items()]
    console.print(title, *lines, Text(f"\n{chat_line(url)}\n{curl}\n"), sep="\n", soft_wrap=True)
