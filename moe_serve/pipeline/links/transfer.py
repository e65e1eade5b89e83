"""A message on its way between two ranks, and the error raised when it does not arrive."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_serve.errors import MoeServeError


class PeerLostError(MoeServeError):
    """A transfer failed: the peer died, froze or left this epoch.

    Names the rank and the operation.
    """

    def __init__(self, peer: str, operation: object, cause: str) -> None:
        super().__init__(f"{peer} is lost ({operation}): {cause}")
        self.peer = peer


class Transfer(Protocol):
    """A transfer in progress. Its buffer may be reused after `wait`."""

    def wait(self) -> None:
        """Waits until the transfer has ended; raises PeerLostError if it fails or takes too
        long."""
        ...


class Link(Protocol):
    """The connection to one peer.

    `operation` describes the transfer in words, for error messages.
    """

    def send(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begins to send a uint8 buffer; it may not change until `wait`."""
        ...

    def receive(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begins to receive into a buffer that is large enough. The tag identifies the message."""
        ...

    def close(self) -> None:
        """Closes the link, which wakes a peer that waits."""
        ...
