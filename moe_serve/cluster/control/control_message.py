"""The base of all control messages."""

from __future__ import annotations

import msgspec


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Encodes the fields in order, without their names."""
