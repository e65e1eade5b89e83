"""Transfers between hosts: a gloo process group over buffers in host memory.

The group is made for one epoch and owned here, not registered as torch's default. Dropping it
closes its sockets, which wakes peers that wait: gloo has no other way to interrupt a wait.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo

from moe_serve.pipeline.links.transfer import PeerLostError, Transfer


@dataclass(slots=True)
class _GlooWork:
    """Implements Transfer. Keeps the buffer alive."""

    peer: str
    work: Any
    buffer: Tensor
    operation: object

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerLostError(self.peer, self.operation, first_line(error)) from None


class ProcessGroup:
    """Contains all members of an epoch; `link` returns the link to one of them."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        host: str,
        *,
        meeting_s: float,
        timeout_s: float,
    ) -> None:
        """Meets the other members; raises RuntimeError if not all arrive within `meeting_s`."""
        self._group: Any = make_group(store, rank, size, host, meeting_s)
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def link(self, peer: str, index: int) -> GroupLink:
        return GroupLink(self, peer, index)

    def begin(self, name: str, buffer: Tensor, index: int, tag: int) -> Any:
        return getattr(self._group, name)([buffer], index, tag)

    def close(self) -> None:
        """Drops the group. The callers must hold no transfer any more."""
        self._group = None
        gc.collect()


class GroupLink:
    """Implements Link with a process group."""

    def __init__(self, group: ProcessGroup, peer: str, index: int) -> None:
        self._group, self._peer, self._index = group, peer, index

    def send(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return self._begin("send", buffer, tag, operation)

    def receive(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return self._begin("recv", buffer, tag, operation)

    def close(self) -> None:
        """Does nothing: closing the group closes all links at once."""

    def _begin(self, name: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        try:
            work = self._group.begin(name, buffer, self._index, tag)
        except RuntimeError as error:
            raise PeerLostError(self._peer, operation, first_line(error)) from None
        return _GlooWork(self._peer, work, buffer, operation)


def make_group(store: Any, rank: int, size: int, host: str, meeting_s: float) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]  # listens on this address only
    options._timeout, options._threads = timedelta(seconds=meeting_s), 1
    return gloo(store, rank, size, options)


def first_line(error: Exception) -> str:
    """Returns the first line of one of torch's long messages."""
    text = str(error).splitlines()[0]
    return text.rpartition("] ")[2] if text.startswith("[") else text
