"""The control messages that move KV pages from one attention rank to another.

    coordinator                source rank                    target rank
    SendPages   ------------>  pages -> slots, checksum
                <------------  PagesSent
    TakePages   -------------------------------------------->  checksum, slots -> pages, finite?
                <--------------------------------------------  PagesTaken

Without common memory, `ExpectPages` goes to the target first, the source sends the slots to the
target's parcel port, and `PagesArrived` comes before `TakePages`. NIXL writes to the target's
slots, so `PagesSent` is enough, as with common memory. A ticket names a parcel; the
coordinator uses no ticket twice, and higher ones are younger.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moe_serve.cluster.control.control_message import ControlMessage


class MemoryPath(msgspec.Struct, frozen=True, array_like=True):
    """The path of a `ParcelMemory`, and the token that it begins with."""

    path: str
    token: bytes


class ParcelSetup(msgspec.Struct, frozen=True, array_like=True):
    """Tells a rank how parcels reach it: through the common memory, through its own port, or
    through either of them, which means the memory if the rank can open it.
    """

    num_bytes: int  # of the common memory, and for each direction of a rank with a port
    common: MemoryPath | None = None
    has_port: bool = False
    has_agent: bool = False  # through NIXL only


class ParcelFacts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The facts by which ranks can exchange parcels with this one. Hashes are hexadecimal."""

    page_size: int
    page_bytes: int  # of all shards
    geometry: str  # of a page on the wire
    has_memory: bool = False  # it has opened the common memory
    host: str = ""
    port: int = 0  # 0: none
    agent: bytes = b""  # by which NIXL reaches it; empty: it does not
    base: int = 0  # the address of its slots, for NIXL


class SendPages(ControlMessage, frozen=True):
    """Tells a rank to copy pages into slots of the common memory, or into its own slots and from
    there to the rank at a port or to the addresses of an agent.
    """

    ticket: int
    pages: Sequence[int]
    slots: Sequence[int]
    host: str = ""
    port: int = 0
    agent: bytes = b""
    addresses: Sequence[int] = ()

    @property
    def is_common(self) -> bool:
        return not self.port and not self.agent


class ExpectPages(ControlMessage, frozen=True):
    """Tells a rank that a parcel will come to its port, and into which slots it goes."""

    ticket: int
    slots: Sequence[int]


class ForgetPages(ControlMessage, frozen=True):
    """Tells a rank to stop expecting a parcel. The answer is PagesTaken."""

    ticket: int


class TakePages(ControlMessage, frozen=True):
    """Tells a rank to copy slots into pages if their checksum is right. `is_common`: slots of the
    common memory, not of its own."""

    ticket: int
    slots: Sequence[int]
    pages: Sequence[int]
    checksum: int
    is_common: bool


class PagesSent(ControlMessage, frozen=True):
    """Reports that the pages are in the slots: with a port, that they have left them; with an
    agent, that they are in the target's slots. A `why` that is not empty says why they are not.
    """

    ticket: int
    checksum: int = 0
    why: str = ""


class PagesArrived(ControlMessage, frozen=True):
    """Reports that the slots of an expected parcel are filled. A `why` that is not empty says why
    they never will be.
    """

    ticket: int
    checksum: int = 0  # as the source states it
    why: str = ""


class PagesTaken(ControlMessage, frozen=True):
    """Reports that the pages hold the values. A `why` that is not empty says why they do not; then
    they are zero or untouched.
    """

    ticket: int
    why: str = ""


ParcelOrder = SendPages | ExpectPages | ForgetPages | TakePages
ParcelReport = PagesSent | PagesArrived | PagesTaken
