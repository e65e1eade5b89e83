"""The control messages about adapters: two orders, and the answer to the first."""

from __future__ import annotations

from moe_serve.cluster.control.control_message import ControlMessage
from moe_serve.model.stage.adapter_rows import AdapterKind


class LoadAdapter(ControlMessage, frozen=True):
    """Tells a rank to load its part of an adapter. It reads beside its steps, unless it may get
    rows of the adapter before it has answered (`is_due`)."""

    number: int
    digest: bytes
    folder: str
    is_due: bool = False


class DropAdapter(ControlMessage, frozen=True):
    """Tells a rank that no row will have this adapter any more."""

    number: int


class AdapterLoaded(ControlMessage, frozen=True):
    """The rank has its part of an adapter; `why`: it has not, also if it had it before."""

    number: int
    kind: AdapterKind = "lora"
    rank: int = 0
    num_bytes: int = 0  # on this rank
    why: str | None = None
