"""One message on its way between two ranks, and what is raised when it does not arrive."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_serve.errors import MoeServeError


class PeerLostError(MoeServeError):
    """A transfer failed: the peer died, froze, or gave this epoch up. Names rank and operation."""

    def __init__(self, peer: str, operation: object, cause: str) -> None:
        super().__init__(f"{peer} is lost ({operation}): {cause}")
        self.peer = peer


class Transfer(Protocol):
    """Under way. Its buffer may be used again after `wait`."""

    def wait(self) -> None:
        """Until it has ended; raises PeerLostError if it fails or takes too long."""
        ...


class Link(Protocol):
    """The way to one peer. `operation` is what is done, in words, should it fail."""

    def send(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begin to send a uint8 buffer; it may not change until `wait`."""
        ...

    def receive(self, buffer: Tensor, tag: int, operation: object) -> Transfer:
        """Begin to receive into a buffer that is large enough. Messages are told apart by tag."""
        ...

    def close(self) -> None:
        """Wakes the peer, should it wait."""
        ...
