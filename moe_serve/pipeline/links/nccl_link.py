"""Transfers from GPU to GPU by NCCL. Written without access to a GPU: nothing here has run on one.

The host waits for no transfer. `Transfer.wait` makes the current stream wait, so kernels queued
after it see the received data. The transfers themselves run on NCCL's own streams, which wait for
the work that the current stream had queued when they began, so the next micro-batch's attention
runs meanwhile. The host checks only at a step's end, with a deadline (`NcclGroups.settle`).

NCCL has no tags: messages between two ranks are matched in the order in which both sides begin
them. Rows and sums therefore have a communicator each: in either direction all messages of a pair
come in the order of exchanges, and a receive of one direction never blocks the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from moe_serve.pipeline.links.gloo_link import first_line
from moe_serve.pipeline.links.transfer import PeerLostError, Transfer

_DIRECTIONS = ("rows", "sums")  # chosen by the tag's lowest bit, see step_shape.py
_POLL_S = 50e-6
# On a timeout NCCL's own watchdog aborts communicators instead of ending the process.
_ABORT_ONLY = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}

MakeGroup = Callable[[Any, int, int, float], Any]  # (store, rank, size, timeout_s)


class _NcclWork:
    """Implements Transfer. Keeps the buffer alive."""

    def __init__(self, peer: str, work: Any, buffer: Tensor, operation: object) -> None:
        self.peer, self.operation = peer, operation
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        """Makes the current stream wait, not the host."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise PeerLostError(self.peer, self.operation, first_line(error)) from None

    @property
    def has_ended(self) -> bool:
        try:
            return bool(self._work.is_completed())
        except RuntimeError as error:
            raise PeerLostError(self.peer, self.operation, first_line(error)) from None


class NcclGroups:
    """Contains all members of an epoch, with one group for each direction."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        make_group: MakeGroup | None = None,
    ) -> None:
        """Raises RuntimeError. `make_group` None means NCCL's."""
        os.environ.update(_ABORT_ONLY)
        make = make_group or _nccl_group
        self._groups = [
            make(PrefixStore(name, store), rank, size, timeout_s) for name in _DIRECTIONS
        ]
        self._device, self._timeout_s = device, timeout_s
        # the last transfer of each peer is enough: they end in order
        self._last: dict[tuple[str, str, int], _NcclWork] = {}

    def connect(self, peers: Sequence[tuple[str, int]], is_expert: bool) -> None:
        """Sends an empty message each way, so that communicators are made now.

        At this time all members wait for nothing else, and all connect in the same order. Raises
        PeerLostError.
        """
        greeting = torch.zeros(64, dtype=torch.uint8, device=self._device)
        answer = torch.zeros_like(greeting)
        try:
            for peer, index in peers:
                for tag, name in enumerate(("recv", "send") if is_expert else ("send", "recv")):
                    buffer = greeting if name == "send" else answer
                    self.begin(name, peer, index, buffer, tag, "meeting").wait()
            self.settle()
        except PeerLostError:
            self.abort()
            raise

    def link(self, peer: str, index: int) -> NcclLink:
        return NcclLink(self, peer, index)

    def begin(
        self, name: str, peer: str, index: int, buffer: Tensor, tag: int, operation: object
    ) -> _NcclWork:
        """Begins a transfer. `name` is send or recv. Both sides give buffers of the same size."""
        if not self._groups:
            raise PeerLostError(peer, operation, "this epoch was given up")
        try:
            work = getattr(self._groups[tag % 2], name)([buffer], index, 0)
        except RuntimeError as error:
            raise PeerLostError(peer, operation, first_line(error)) from None
        began = _NcclWork(peer, work, buffer, operation)
        self._last[peer, name, tag % 2] = began
        return began

    def settle(self) -> None:
        """Waits on the host until all begun transfers have ended; aborts and raises PeerLostError
        on failure.
        """
        deadline = time.monotonic() + self._timeout_s
        for work in list(self._last.values()):
            while not work.has_ended:
                if time.monotonic() > deadline:
                    self.abort()
                    why = f"silent for {self._timeout_s:g} s"
                    raise PeerLostError(work.peer, work.operation, why)
                time.sleep(_POLL_S)
        self._last.clear()

    def abort(self) -> None:
        """Ends kernels that wait for a peer; the groups cannot be used afterwards."""
        groups, self._groups = self._groups, []
        self._last.clear()
        for group in groups:
            group.abort()

    close = abort


class NcclLink:
    """Implements Link."""

    def __init__(self, groups: NcclGroups, peer: str, index: int) -> None:
        self._groups, self._peer, self._index = groups, peer, index

    def send(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return self._groups.begin("send", self._peer, self._index, buffer, tag, operation)

    def receive(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        return self._groups.begin("recv", self._peer, self._index, buffer, tag, operation)

    def close(self) -> None:
        """Does nothing: closing the groups closes all links at once."""


def gpu_of(device: torch.device) -> str:
    """Returns a unique name for a rank's GPU; empty if NCCL does not reach it."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _nccl_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    nccl: Any = torch.distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, size, options)
