"""Traces one live streamed chat and prints every call between its route and its expert kernel.

    PYTHONPATH=.:kernels python scripts/trace_chat.py

Serves the demonstration model on a free port, streams one chat and records two stacks: the event
loop's when the request is handed to the engine's thread, and that of the engine's thread at the
first call of an expert kernel. Prints them as one path, from the route's function to the kernel,
with its length. Exits with 1 if the path is longer than the limits below, which
tests/scripts/test_trace_chat.py checks. Takes a few seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from moe_kernels.cpu.native_experts import ExpertTable
from moe_kernels.cpu.native_stack import NativeStack
from moe_kernels.reference.torch_kernels import TorchExperts
from moe_serve.cli.main import app
from moe_serve.engine.async_engine import AsyncEngine
from moe_serve.http.openai import chat_routes

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("moe_serve", "experts", "kernels"))
MAX_CALLS, MAX_FILES = 14, 10
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Call:
    """One function on the path. `thread` is the name of the thread that runs it."""

    file: str
    function: str
    thread: str


def traced_path() -> list[Call]:
    """Serves, streams one chat, and returns the calls from its route to its first expert kernel."""
    stacks: dict[str, list[Call]] = {}
    _record(AsyncEngine, "submit", stacks)
    for bank in (NativeStack, ExpertTable, TorchExperts):
        _record(bank, "__call__", stacks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = threading.Thread(target=_ask, args=(port, stacks), name="client")
    asked.start()
    app(["serve", "--port", str(port)], standalone_mode=False)
    asked.join()
    route = next(
        index for index, call in enumerate(stacks["submit"]) if call.file == _file(chat_routes)
    )
    return stacks["submit"][route:] + stacks["__call__"]


def _record(kind: type, name: str, stacks: dict[str, list[Call]]) -> None:
    """Keeps the stack of the first call of a method after the server became ready."""
    original: Callable[..., Any] = getattr(kind, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        if "ready" in stacks and name not in stacks:
            stacks[name] = [
                *_stack(sys._getframe(1)),
                Call(_file(sys.modules[kind.__module__]), f"{kind.__name__}.{name}", _thread()),
            ]
        return original(*arguments, **options)

    setattr(kind, name, recorded)


def _stack(frame: FrameType | None) -> list[Call]:
    """Returns this project's calls of a stack, outermost first."""
    found: list[Call] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            file = str(Path(code.co_filename).relative_to(ROOT))
            found.append(Call(file, getattr(code, "co_qualname", code.co_name), _thread()))
        frame = frame.f_back
    return found[::-1]


def _ask(port: int, stacks: dict[str, list[Call]]) -> None:
    """Waits until the server is ready, stream one chat and ends the server."""
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < until:
            try:
                if httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        stacks["ready"] = []
        question = {"role": "user", "content": "Tell me a story about a king."}
        body = {"messages": [question], "max_tokens": 3, "stream": True}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def _file(module: Any) -> str:
    return str(Path(module.__file__).relative_to(ROOT))


def _thread() -> str:
    return threading.current_thread().name


def main() -> int:
    path = traced_path()
    files = {call.file for call in path}
    for number, call in enumerate(path, 1):
        print(f"{number:3} {call.file:48} {call.function:40} {call.thread}")
    print(f"{len(path)} calls in {len(files)} files (limits: {MAX_CALLS} and {MAX_FILES})")
    return int(len(path) > MAX_CALLS or len(files) > MAX_FILES)


if __name__ == "__main__":
    sys.exit(main())
