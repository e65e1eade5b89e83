"""The data plane of one epoch: a link to each peer, and an end that wakes whoever waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from moe_serve.pipeline.gloo_link import ProcessGroup, first_line
from moe_serve.pipeline.meeting import Met, meet, meeting_store
from moe_serve.pipeline.shared_link import SharedLink
from moe_serve.pipeline.transfer import Link, PeerLostError, Transfer

MEETING_TIMEOUT_S = 5.0  # all members are idle when they are called together


class DataGroup:
    """Ranks by name, in the order in which all of them list the members.

    Peers on the same host are reached through shared memory, others by a process group; with
    `is_sharing` False all by the process group."""

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
    ) -> None:
        """Meets the others; raises PeerLostError if not all come in time."""
        self.epoch, self.members = epoch, tuple(members)
        index = {name: place for place, name in enumerate(members)}
        meeting_s = min(timeout_s, MEETING_TIMEOUT_S)
        self._links: dict[str, Link] = {}
        self._group: ProcessGroup | None = None
        prefix = PrefixStore(f"data-{epoch}", store)
        share = is_sharing and device.type == "cpu"
        try:
            met: Met = meet(
                meeting_store(store, epoch), index[me], len(members),
                [index[name] for name in peers], meeting_s, share,
            )  # fmt: skip
            if not met.is_one_host:
                self._group = ProcessGroup(
                    prefix, index[me], len(members), host, device,
                    meeting_s=meeting_s, timeout_s=timeout_s,
                )  # fmt: skip
        except (RuntimeError, OSError) as error:
            others = ", ".join(name for name in members if name != me)
            raise PeerLostError(others, f"meeting in epoch {epoch}", first_line(error)) from None
        for name in peers:
            connection = met.local.get(index[name])
            if connection is not None:
                self._links[name] = SharedLink(name, connection, timeout_s, delay_s)
            else:
                assert self._group is not None, f"no way from {me} to {name}"
                self._links[name] = self._group.link(name, index[name])

    def send(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.send`."""
        return self._links[peer].send(buffer, tag, operation)

    def receive(self, peer: str, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """See `Link.receive`."""
        return self._links[peer].receive(buffer, tag, operation)

    def close(self) -> None:
        """End all links. The caller holds no transfer any more."""
        for link in self._links.values():
            link.close()
        self._links = {}
        if self._group is not None:
            self._group.close()
