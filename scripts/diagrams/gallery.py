"""Lists the drawings and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from diagrams.layouts import layouts
from diagrams.moe_layer import moe_layer
from diagrams.ping_pong import ping_pong
from diagrams.request_path import request_path
from diagrams.svg import Picture

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "layouts.svg": layouts,
    "moe-layer.svg": moe_layer,
    "ping-pong.svg": ping_pong,
    "request-path.svg": request_path,
}
