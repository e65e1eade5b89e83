"""The process that has imported torch and the server, and forks a copy of itself for each order.

It reads orders from a socket and ends with it. A copy becomes a child of the process
that sent the order: the process between both ends at once, and the sender adopts orphans meanwhile.
A long last argument is memory for the command line that a copy shows in /proc.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from tests.support.forks import popen
from tests.support.forks.order import WORKERS, Order, Program, close_all, program_of, receive

ROOT = Path(__file__).resolve().parents[3]
_BASE_PATH = tuple(sys.path[1:])  # the first entry is the checkout
_HIGH = popen.MAX_DESCRIPTOR + 2
_AT_START = frozenset(os.environ)
_PATIENCE_S = 5.0
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_IMPORTED = (
    "moe_serve.cli.main", "moe_serve.cli.serve.service", "moe_serve.cluster.steps.cluster_engine",
    "moe_serve.engine.build", "moe_serve.http.app", "moe_serve.http.server",
)  # fmt: skip


def load() -> None:
    """Imports what servers and ranks import. They are imported again as the main program."""
    sys.path[:] = [str(ROOT), str(ROOT / "kernels"), *_BASE_PATH]
    for name in (*_IMPORTED, *WORKERS):
        importlib.import_module(name)
    for name in WORKERS:
        del sys.modules[name]
    gc.collect()
    gc.freeze()


def serve(connection: socket.socket) -> Program | None:
    """Forks a copy for each order. Returns in a copy with its program, and None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (received := receive(connection)) is not None:
        order, descriptors = received
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            close_all(descriptors)
            continue
        if os.fork():
            os._exit(0)
        program = program_of(order.argv)
        assert program is not None, order.argv
        _become(order, descriptors, connection)
        _set_up(order, program)
        return program
    return None


def _become(order: Order, descriptors: list[int], connection: socket.socket) -> None:
    """Takes the descriptors, the session and the parent of the order, and answers."""
    deadline = time.monotonic() + _PATIENCE_S
    while os.getppid() != order.parent:
        if time.monotonic() > deadline:
            connection.sendall(b"0\n")
            os._exit(1)
        time.sleep(0.0005)
    if order.new_session:
        os.setsid()
    if order.namespace and not _enter(order.namespace):
        connection.sendall(b"0\n")
        os._exit(1)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _HIGH) for each in descriptors]
    answer = os.dup2(connection.fileno(), _HIGH - 1, inheritable=False)
    os.closerange(3, _HIGH - 1)
    connection.detach()
    for source, target in zip(high, order.fds, strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(order.folder)
    os.write(answer, b"%d\n" % os.getpid())
    os.close(answer)


def _enter(namespace: str) -> bool:
    """Moves this thread to a network namespace that `ip` has made."""
    try:
        with (_NAMESPACES / namespace).open("rb") as file:
            return ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
    except OSError:
        return False


def _set_up(order: Order, program: Program) -> None:
    """Gives this process the state that the interpreter has at the start of the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_by_imports = {name: os.environ[name] for name in os.environ if name not in _AT_START}
    os.environ.clear()
    os.environ.update(set_by_imports | order.environment)
    unbuffered = bool(order.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)))
    sys.stdout = _writer(1, unbuffered, is_error=False)
    sys.stderr = _writer(2, unbuffered, is_error=True)
    path = order.environment.get("PYTHONPATH", "")
    first = [] if program.safe_path else [order.folder]
    sys.path[:] = [*first, *filter(None, path.split(os.pathsep)), *_BASE_PATH]
    sys.argv = ["-m", *program.arguments]
    sys.orig_argv = list(order.argv)
    _show_command(order.argv)


def _writer(descriptor: int, unbuffered: bool, *, is_error: bool) -> io.TextIOWrapper:
    """Opens a standard stream as the interpreter does."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        errors="backslashreplace" if is_error else None,
        line_buffering=is_error or os.isatty(descriptor),
        write_through=unbuffered,
    )


def _show_command(argv: tuple[str, ...]) -> None:
    """Writes the command line where /proc/PID/cmdline reads it."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        text = b"\0".join(map(os.fsencode, argv)) + b"\0"
        if 0 < len(text) < end - start:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))


def run(descriptor: int) -> None:
    """Serves the orders of a socket; in a copy, runs its program."""
    load()
    program = serve(socket.socket(fileno=descriptor))
    while program is not None:
        descriptor = _offer_copies()
        if descriptor < 0:
            _run_and_exit(program)
        program = serve(socket.socket(fileno=descriptor))
    os._exit(0)


def _run_and_exit(program: Program) -> None:
    """Runs a program and ends this process without deleting its modules. To delete them copies the
    memory that this process shares with the template, which takes a third of a second of a core.

    As the interpreter does, it first waits for threads, calls exit functions and flushes.
    """
    status: object = None
    try:
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    if not isinstance(status, int | None):
        sys.exit(status)  # a message
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit((status or 0) & 0xFF)


def _offer_copies() -> int:
    """Forks a template for the children of this copy. Returns -1 here, and its socket there."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        popen.use(popen.Template(ours))
        return -1
    nothing = os.open(os.devnull, os.O_RDWR)
    for target in range(3):
        os.dup2(nothing, target)
    kept = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    ours.detach(), theirs.detach()
    os.closerange(3, _HIGH)
    _show_command((sys.executable, "template of", str(os.getppid())))
    return kept
