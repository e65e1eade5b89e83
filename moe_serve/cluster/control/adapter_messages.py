"""The control messages about adapters: two orders, and the answer to the first."""

from __future__ import annotations

from moe_serve.cluster.control.control_message import ControlMessage
from moe_serve.model.stage.adapter_rows import AdapterKind


class LoadAdapter(ControlMessage, frozen=True):
    """Tells a rank to load its part of an adapter. It reads beside its steps, except with `is_due`:
    then rows of the adapter may come before the rank has answered.
    """

    number: int
    digest: bytes
    folder: str
    is_due: bool = False


class DropAdapter(ControlMessage, frozen=True):
    """Tells a rank that no further row will have this adapter."""

    number: int


class AdapterLoaded(ControlMessage, frozen=True):
    """The answer of a rank about its part of an adapter. `why` is empty if the rank has it, and
    otherwise the reason why it does not, or no longer, have it.
    """

    number: int
    kind: AdapterKind = "lora"
    rank: int = 0
    num_bytes: int = 0  # on this rank
    why: str | None = None
