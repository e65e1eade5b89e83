"""A rank's part of the pre-flight: it looks at its files, and at the ports of the others."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_serve import __version__
from moe_serve.cluster.control.messages import Examine, Examined
from moe_serve.cluster.control.probe import probe
from moe_serve.cluster.members.file_marks import file_marks
from moe_serve.errors import CheckpointError


def versions() -> dict[str, str]:
    """What must be the same everywhere. (The control protocol's own is part of the handshake.)"""
    return {"moe-serve": __version__, "torch": str(torch.__version__)}


def examine(order: Examine) -> Examined:
    probes = probe(order.targets, order.timeout_s)
    try:
        return Examined(files=file_marks(Path(order.folder)), probes=probes)
    except CheckpointError as error:
        return Examined(files=(), probes=probes, why=str(error))
