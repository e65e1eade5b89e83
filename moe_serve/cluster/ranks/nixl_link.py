"""Writes parcels into the slots of other ranks through NIXL, which chooses RDMA or TCP.

NIXL is optional: `pip install --no-deps nixl nixl-cu12`. Its ports check no secret, so use it only
in a network that only the cluster can reach. It writes to slots, never to pages, and the contents
of a slot are only used if their checksum equals the one that comes over the control connection.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_serve.cache.transfer.wire_pages import checksum
from moe_serve.cluster.control.parcel_messages import PagesSent, ParcelReport, SendPages
from moe_serve.cluster.ranks.shard_parcels import Slots
from moe_serve.errors import ChannelClosedError, ConfigError

_POLL_S = 2e-4
_CLOSE_S = 1.0

_Item = tuple[SendPages, float]  # with its deadline


class NixlLink:
    """One agent for this rank's slots. A thread sends one parcel after the other."""

    def __init__(
        self, slots: Slots, timeout_s: float, tell: Callable[[ParcelReport], None]
    ) -> None:
        """`tell` is called on the thread. Raises ConfigError without the package."""
        self._slots, self._timeout_s, self._tell = slots, timeout_s, tell
        self._agent = _new_agent()
        self._agent.register_memory([(self.base, slots.nbytes, 0, "")], "DRAM")
        self.address = bytes(self._agent.get_agent_metadata())
        self._peers: dict[bytes, str] = {}
        self._waiting: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="parcels by NIXL", daemon=True)
        self._thread.start()

    @property
    def base(self) -> int:
        """The address of the first slot in this process."""
        return int(self._slots.ctypes.data)

    def send(self, order: SendPages) -> None:
        """Sends the slots of an order. PagesSent is reported when they are in the target's
        slots.
        """
        self._waiting.put((order, time.monotonic() + self._timeout_s))

    def close(self) -> None:
        """Ends the thread after the parcel that it sends."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # the rank ends
            while (item := self._waiting.get()) is not None:
                order, deadline = item
                crc = checksum(order.slots, self._slots)
                why = self._written(order, deadline)
                self._tell(PagesSent(ticket=order.ticket, checksum=crc, why=why))

    def _written(self, order: SendPages, deadline: float) -> str:
        """Writes a parcel. Returns why it has not arrived, or ""."""
        try:
            state = self._state_after(order, deadline)
        except Exception as error:  # NIXL's errors have no common class of their own
            if (peer := self._peers.pop(order.agent, None)) is not None:
                with contextlib.suppress(Exception):  # the next parcel adds it again
                    self._agent.remove_remote_agent(peer)
            return f"NIXL failed ({type(error).__name__}: {error})"
        return "" if state == "DONE" else f"NIXL's transfer is in the state {state}"

    def _state_after(self, order: SendPages, deadline: float) -> str:
        agent, page_bytes = self._agent, self._slots.shape[1]
        if order.agent not in self._peers:
            self._peers[order.agent] = agent.add_remote_agent(order.agent)
        ours = [(self.base + slot * page_bytes, page_bytes, 0) for slot in order.slots]
        theirs = [(address, page_bytes, 0) for address in order.addresses]
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(ours, "DRAM"),
            agent.get_xfer_descs(theirs, "DRAM"),
            self._peers[order.agent],
        )
        try:
            state = str(agent.transfer(handle))
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                state = str(agent.check_xfer_state(handle))
            return state
        finally:
            agent.release_xfer_handle(handle)


def _new_agent() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise ConfigError(
            f"cells.link is 'nixl', but NIXL cannot be imported ({error}): install it with 'pip "
            "install --no-deps nixl nixl-cu12', or use 'auto'."
        ) from None
    return nixl_agent(secrets.token_hex(8), nixl_agent_config(backends=["UCX"]))
