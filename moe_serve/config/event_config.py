"""The configuration of KV events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttachName = Literal["auto", "bind", "connect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Messages about pages that enter and leave the prefix cache, for gateways that send a request
    where its prefix is cached. Each attention rank has its own port, counted from these."""

    endpoint: str | None = None  # ZeroMQ address; None: nothing is published
    replay_endpoint: str | None = None  # where subscribers ask for batches that they have missed
    topic: str | None = None  # None: the empty topic
    buffer_steps: int = 10_000  # batches that are kept for replays
    hwm: int = 100_000  # batches that wait for a slow subscriber before it misses some
    attach: AttachName = "auto"  # auto: listens on addresses of this machine, else connects
    encoding: Literal["array", "map"] = "array"  # of an event
    block_hash: Literal["int", "bytes"] = "int"  # 64 bits of a page's key, or all of it
