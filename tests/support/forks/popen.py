"""Lets `subprocess.Popen` start known Python commands as copies of a template process."""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.forks.order import Order, fixed_variables, network_of, program_of, send

_PR_SET_CHILD_SUBREAPER = 36
_TEMPLATE = "import sys; from tests.support.forks import template; template.run(int(sys.argv[1]))"
_PADDING = "x" * 8192
MAX_DESCRIPTOR = 700  # that an order may name
_NUM_ARGUMENTS = 23  # of `_fork_exec` in the versions of Python that are known here


class Template:
    """A template process of this process, started by its first order. Any thread may call it.

    If tests change the environment for good, the first order with the new one starts an ordinary
    process, and the second starts a new template.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None  # unless it was there before
        self._fixed = fixed_variables(os.environ)
        self._missed: dict[str, str] = {}
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def variables(self) -> dict[str, str]:
        """Returns the variables that the template has and that copies must have."""
        return self._fixed

    def fork(self, order: Order, descriptors: list[int]) -> int | None:
        """Returns the pid of a copy, which is a child of this process, or None if there can be
        none."""
        if (
            os.getpid() != self._owner
            or program_of(order.argv) is None
            or max(order.fds) > MAX_DESCRIPTOR
        ):
            return None
        with self._lock:
            connection = self._for(fixed_variables(order.environment))
            return None if connection is None else self._ask(connection, order, descriptors)

    def _for(self, fixed: dict[str, str]) -> socket.socket | None:
        """Returns the connection to a template with these variables."""
        if fixed != self._fixed and self._connection is not None:
            if fixed != self._missed or fixed != fixed_variables(os.environ):
                self._missed = fixed
                return None
            self._end()
        if self._connection is None:
            self._fixed = fixed
            self._process, self._connection = _start_template()
            atexit.register(self._end)
        return self._connection if fixed == self._fixed else None

    def _ask(self, connection: socket.socket, order: Order, descriptors: list[int]) -> int | None:
        self._adopt_orphans(True)
        try:
            send(connection, order, descriptors)
            answer = b""
            while not answer.endswith(b"\n"):
                piece = connection.recv(64)
                if not piece:
                    return None
                answer += piece
        except OSError:
            return None
        finally:
            self._adopt_orphans(False)
        return int(answer) or None

    def _end(self) -> None:
        if os.getpid() == self._owner and self._connection is not None:
            self._connection.close()
            self._connection = None
            if self._process is not None:
                self._process.wait()

    def _adopt_orphans(self, yes: bool) -> None:
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(yes), 0, 0, 0)


ORIGINAL: Any = getattr(subprocess, "_fork_exec", None)


def use(template: Template) -> None:
    """Makes `Popen` start the commands that the template knows as copies of it.

    This changes nothing on systems and Python versions that have other means.
    """
    if sys.platform != "linux" or ORIGINAL is None or sys.version_info < (3, 11):
        return

    def fork_exec(*given: Any) -> int:
        pid = _fork(template, given) if _is_plain(given) else None
        return int(ORIGINAL(*given)) if pid is None else pid

    subprocess._fork_exec = fork_exec


def is_template(pid: int) -> bool:
    """Returns True for the template of a copy's children, which ends soon after the copy, and for
    a process that has ended."""
    try:
        return b"\0template of\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


def _fork(template: Template, given: tuple[Any, ...]) -> int | None:
    passed = [each for each in given[3] if each != given[13]]
    namespace, argv = network_of([os.fsdecode(each) for each in given[0]])
    order = Order(
        argv=tuple(argv),
        environment=dict(os.environ) if given[5] is None else _environment(given[5]),
        folder=os.path.abspath(os.fsdecode(given[4] or os.getcwd())),
        fds=(0, 1, 2, *passed),
        new_session=bool(given[15]),
        parent=os.getpid(),
        namespace=namespace,
    )
    return template.fork(order, [*_streams(given), *passed])


def _start_template() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [sys.executable, "-c", _TEMPLATE, str(theirs.fileno()), _PADDING],
        cwd=Path(__file__).resolve().parents[3],
        env=environment,
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    return process, ours


def _is_plain(given: tuple[Any, ...]) -> bool:
    """Returns True if the call asks only for features that a copy has."""
    if len(given) != _NUM_ARGUMENTS:
        return False
    process_group, gid, gids, uid, umask, preexec = given[16:22]
    is_default = process_group == -1 and gid is gids is uid is preexec is None and umask < 0
    return bool(given[2]) and is_default  # closes all other descriptors


def _streams(given: tuple[Any, ...]) -> list[int]:
    """Returns our descriptors for its standard streams."""
    stdin, stdout, stderr = given[6], given[9], given[11]
    return [own if each == -1 else each for own, each in enumerate((stdin, stdout, stderr))]


def _environment(listed: list[bytes]) -> dict[str, str]:
    pairs = (each.partition(b"=") for each in listed)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
