"""Ends a worker when the process that started it ends, however that happens.

It uses two ways. The worker's standard input is a pipe whose other end only the parent holds, so
end of file means that the parent is gone. On Linux the kernel also sends SIGKILL, which reaches a
worker that is stopped, or whose threads never return to Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Call this first in a worker that LocalProcesses started; without a pipe it does nothing.

    It also notices a parent that died before the call: the pipe is at end of file then.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        number = ctypes.c_ulong(signal.SIGKILL)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    threading.Thread(target=_wait_for_the_end, name="parent-watch", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 4096):
        pass  # nothing is written here, and only end of file matters
    os.kill(os.getpid(), signal.SIGKILL)
