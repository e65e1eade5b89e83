"""The figures of a run with several cells: the work of each cell, hand-overs, and numbers of cells
over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_serve.bench.figures.summary import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """One cell. `num_started`: requests whose first token it computed."""

    shape: str
    num_devices: int
    num_steps: int
    num_started: int
    num_tokens: int  # of prompts and answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFigures:
    """The number of cells over time. Hours of devices count from the start of a cell until it was
    empty; `most_changes_per_hour`: within any hour."""

    policy: str
    device_hours: float
    all_device_hours: float  # if all cells had been there all the time
    num_changes: int
    most_changes_per_hour: int

    @property
    def share(self) -> float:
        """The share of the device hours of all cells."""
        return self.device_hours / self.all_device_hours if self.all_device_hours else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CellsFigures:
    """All cells. `exposed_ms`: from a request's last token in one cell until the step begins that
    computes the next in the other; `exposed_share`: its mean, as a share of the mean time to the
    first token of these requests."""

    cells: tuple[CellFigures, ...]
    num_hand_overs: int  # after the prompt
    num_migrations: int  # of running requests, for other reasons
    num_given_up: int  # moves that did not succeed, unless the request had ended
    num_parcels: int
    num_bytes: int
    exposed_ms: Spread | None
    exposed_share: float | None
    scale: ScaleFigures | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CellsFigures:
        values = dict(content)
        exposed, scale = values["exposed_ms"], values.get("scale")
        return cls(
            **values
            | {
                "cells": tuple(CellFigures(**each) for each in values["cells"]),
                "exposed_ms": None if exposed is None else Spread(**exposed),
                "scale": None if scale is None else ScaleFigures(**scale),
            }
        )
