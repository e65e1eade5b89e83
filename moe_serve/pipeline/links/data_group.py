"""The data plane of one epoch: a link to each peer; closing it wakes peers that wait."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from moe_serve.config.sections import TransportName
from moe_serve.pipeline.links.gloo_link import ProcessGroup, first_line
from moe_serve.pipeline.links.meeting import Met, epoch_prefix, meet, meeting_store
from moe_serve.pipeline.links.nccl_link import NcclGroups, gpu_of
from moe_serve.pipeline.links.shared_link import SharedLink
from moe_serve.pipeline.links.transfer import Link, PeerLostError, Transfer

MEETING_TIMEOUT_S = 5.0  # seconds; all members are idle when the meeting is called


class DataGroup:
    """Connects ranks by name, in the member order that all of them share.

    Buffers are in host memory: peers on the same host are reached through shared memory, others by
    gloo; with `is_sharing` False all by gloo. If each member has its own GPU (`is_nccl`), buffers
    are in `device`'s memory and NCCL reaches every peer; both sides of an exchange then give the
    same size.
    """

    def __init__(
        self,
        members: Sequence[str],
        me: str,
        peers: Sequence[str],
        store: Any,
        *,
        epoch: int,
        host: str,
        timeout_s: float,
        device: torch.device,
        is_sharing: bool = True,
        delay_s: float = 0.0,
        transport: TransportName = "host",
    ) -> None:
        """Meets the other members; raises PeerLostError if not all arrive in time."""
        self.epoch, self.members = epoch, tuple(members)
        index = {name: place for place, name in enumerate(members)}
        meeting_s = min(timeout_s, MEETING_TIMEOUT_S)
        self._links: dict[str, Link] = {}
        self._group: ProcessGroup | None = None
        self._nccl: NcclGroups | None = None
        self.is_nccl = False
        prefix = PrefixStore(epoch_prefix(epoch), store)
        places = [(name, index[name]) for name in peers]
        try:
            met: Met = meet(
                meeting_store(store, epoch), index[me], len(members),
                [place for _, place in places], meeting_s, is_sharing,
                "" if transport == "host" else gpu_of(device),
            )  # fmt: skip
            self.is_nccl = met.is_gpu_each
            if self.is_nccl:
                for connection in met.local.values():
                    connection.close()
                self._nccl = NcclGroups(prefix, index[me], len(members), device, timeout_s)
            elif not met.is_one_host:
                self._group = ProcessGroup(
                    prefix, index[me], len(members), host, meeting_s=meeting_s, timeout_s=timeout_s
                )
        except (RuntimeError, OSError) as error:
            others = ", ".join(name for name in members if name != me)
            raise PeerLostError(others, f"meeting in epoch {epoch}", first_line(error)) from None
        if self._nccl is not None:
            self._nccl.connect(places, is_expert=min(place for _, place in places) < index[me])
        for name, place in places:
            self._links[name] = self._link(name, place, met.local.get(place), timeout_s, delay_s)

    def _link(
        self,
        name: str,
        place: int,
        connection: socket.socket | None,
        timeout_s: float,
        delay_s: float,
    ) -> Link:
        if self._nccl is not None:
            return self._nccl.link(name, place)
        if connection is not None:
            return SharedLink(name, connection, timeout_s, delay_s)
        assert self._group is not None, f"there is no link to {name}"
        return self._group.link(name, place)

    def send(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.send`."""
        return self._links[peer].send(buffer, tag, operation)

    def receive(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.receive`."""
        return self._links[peer].receive(buffer, tag, operation)

    def shared_links(self, peers: Sequence[str]) -> list[SharedLink] | None:
        """Returns the links to peers on this host; None if some peer is reached otherwise."""
        links = [self._links[name] for name in peers]
        shared = [link for link in links if isinstance(link, SharedLink)]
        return shared if len(shared) == len(links) else None

    def settle(self) -> None:
        """Waits on the host, with NCCL, until all begun transfers have ended; raises PeerLostError.

        Other transfers ended when they were waited for.
        """
        if self._nccl is not None:
            self._nccl.settle()

    def close(self) -> None:
        """Ends all links. The caller must hold no transfer any more."""
        for link in self._links.values():
            link.close()
        self._links = {}
        if self._group is not None:
            self._group.close()
        if self._nccl is not None:
            self._nccl.close()
