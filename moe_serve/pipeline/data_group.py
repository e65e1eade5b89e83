"""The data plane of one epoch: point-to-point transfers between its ranks, each with a bound.

A torch.distributed process group that only this object holds. Closing it closes its sockets, which
wakes every peer that waits for this rank: nobody hangs because somebody else gave up.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore

from moe_serve.errors import MoeServeError

MEETING_TIMEOUT_S = 5.0  # all members are idle when they are called together


class PeerLostError(MoeServeError):
    """A transfer failed: the peer died, froze, or gave this epoch up. Names rank and operation."""

    def __init__(self, peer: str, operation: object, cause: str) -> None:
        super().__init__(f"{peer} is lost ({operation}): {cause}")
        self.peer = peer


@dataclass(slots=True)
class Transfer:
    """A transfer under way. `wait` once before its buffer is used again."""

    peer: str
    work: Any
    buffer: Tensor  # kept alive until the transfer has ended
    operation: object  # what it is, in words, if it fails

    def wait(self) -> None:
        """Until it has ended; raises PeerLostError if it fails or takes too long."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerLostError(self.peer, self.operation, _first_line(error)) from None


class DataGroup:
    """Ranks by name, in the order in which all of them list the members."""

    def __init__(
        self,
        members: Sequence[str],
        me: str,
        store: Any,
        *,
        epoch: int,
        host: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Meets the others; raises PeerLostError if not all come in time."""
        self.epoch, self.members = epoch, tuple(members)
        self._index = {name: index for index, name in enumerate(members)}
        prefix = PrefixStore(f"data-{epoch}", store)
        meeting = timedelta(seconds=min(timeout_s, MEETING_TIMEOUT_S))
        try:
            self._group: Any = _make_group(
                prefix, self._index[me], len(members), host, meeting, device
            )
            self._group._set_default_timeout(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            others = ", ".join(name for name in members if name != me)
            raise PeerLostError(others, f"meeting in epoch {epoch}", _first_line(error)) from None

    def send(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begin to send a buffer; it may not change until `wait`."""
        return self._begin(self._group.send, peer, buffer, tag, operation)

    def receive(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begin to receive into a buffer that is large enough."""
        return self._begin(self._group.recv, peer, buffer, tag, operation)

    def _begin(
        self, start: Any, peer: str, buffer: Tensor, tag: int, operation: object
    ) -> Transfer:
        try:
            work = start([buffer], self._index[peer], tag)
        except RuntimeError as error:
            raise PeerLostError(peer, operation, _first_line(error)) from None
        return Transfer(peer, work, buffer, operation)

    def close(self) -> None:
        """Drop the group. The caller holds no transfer any more."""
        self._group = None
        gc.collect()


def _make_group(
    store: Any, rank: int, size: int, host: str, timeout: timedelta, device: torch.device
) -> Any:
    if device.type == "cuda":
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]  # listens there and nowhere else
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0]
    return text.rpartition("] ")[2] if text.startswith("[") else text
