"""The service tiers of a workload: a file of tiers, and the share of the requests in each.

    tiers:
      interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1}
      standard: {weight: 2, ttft_s: 5.0}
      flex: {weight: 1, e2e_s: 600, sheddable: true}
    shares: {interactive: 0.5, standard: 0.3, flex: 0.2}

A row of a trace may name its own tier. The tiers of the other requests are drawn by the shares; the
same seed draws the same tiers. Without `shares`, all tiers are equally frequent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_serve.config.tiers import TierConfig
from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file

_NUMBERS = ("weight", "ttft_s", "tpot_s", "e2e_s")
_KEYS = (*_NUMBERS, "sheddable", "max_output_tokens")
_LARGEST = 1e6  # seconds, or weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMix:
    """Tiers, and how frequent each is. The shares add up to 1."""

    tiers: tuple[TierConfig, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, tiers: Sequence[TierConfig], shares: Mapping[str, float] | None = None) -> TierMix:
        """Make a mix. Shares may have any sum above 0; a tier without one is never drawn."""
        names = [tier.name for tier in tiers]
        given = dict.fromkeys(names, 1.0) if shares is None else shares
        for name, share in given.items():
            if name not in names:
                raise BenchError(f"shares has a tier {name!r}; the tiers are {', '.join(names)}.")
            if not 0 <= share <= _LARGEST:
                raise BenchError(f"the share of tier {name!r} must be 0 or more, got {share}.")
        total = sum(given.values())
        if total <= 0:
            raise BenchError("shares must have a number above 0: no request would have a tier.")
        return cls(tiers=tuple(tiers), shares=tuple(given.get(name, 0.0) / total for name in names))

    def named(self, name: str) -> TierConfig:
        """Return a tier by its name. Raises BenchError."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        names = ", ".join(tier.name for tier in self.tiers)
        raise BenchError(f"a request of the trace has tier {name!r}; the tiers are {names}.")

    def at(self, place: float) -> TierConfig:
        """Return the tier at a place from 0 to 1 in the row of all shares."""
        for tier, share in zip(self.tiers, self.shares, strict=True):
            place -= share
            if place < 0:
                return tier
        return self.tiers[int(np.argmax(self.shares))]

    def facts(self) -> dict[str, object]:
        """Return the tiers as JSON types, for a report."""
        return {
            tier.name: {
                "share": share,
                "weight": tier.weight,
                "ttft_s": tier.ttft_s,
                "tpot_s": tier.tpot_s,
                "e2e_s": tier.e2e_s,
                "sheddable": tier.is_sheddable,
                "max_output_tokens": tier.max_output_tokens,
            }
            for tier, share in zip(self.tiers, self.shares, strict=True)
        }


def read_tier_mix(path: Path) -> TierMix:
    """Read a file of tiers, YAML or JSON. Raises BenchError."""
    try:
        content = yaml.safe_load(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise BenchError(f"{path} is not YAML: it must have tiers, and may have shares.") from None
    if not isinstance(content, dict) or not content.keys() <= {"tiers", "shares"}:
        raise BenchError(f"{path} must have the keys tiers and, optionally, shares.")
    tiers, shares = content.get("tiers"), content.get("shares")
    if not isinstance(tiers, dict) or not tiers:
        raise BenchError(f"{path} has no tiers: write tiers: {{NAME: {{weight: 1, ttft_s: 1}}}}.")
    is_known = isinstance(shares, dict) and all(map(_is_number, shares.values()))
    if shares is not None and not is_known:
        raise BenchError(f"shares of {path} must be a number for each tier.")
    return TierMix.of([_tier(str(name), row) for name, row in tiers.items()], shares)


def _tier(name: str, row: Any) -> TierConfig:
    row = {} if row is None else row
    if not isinstance(row, dict) or not row.keys() <= set(_KEYS):
        raise BenchError(f"tier {name!r} takes {', '.join(_KEYS)}; got {str(row)[:80]}.")
    for key in _NUMBERS:
        value = row.get(key, 1)
        if not (_is_number(value) and 0 < value <= _LARGEST):
            raise BenchError(f"{key} of tier {name!r} must be above 0, got {value!r}.")
    most = row.get("max_output_tokens")
    if most is not None and not (isinstance(most, int) and most > 0):
        raise BenchError(f"max_output_tokens of tier {name!r} must be 1 or more, got {most!r}.")
    if not isinstance(row.get("sheddable", False), bool):
        raise BenchError(f"sheddable of tier {name!r} must be true or false.")
    return TierConfig(
        name=name,
        weight=float(row.get("weight", 1.0)),
        ttft_s=_seconds(row, "ttft_s"),
        tpot_s=_seconds(row, "tpot_s"),
        e2e_s=_seconds(row, "e2e_s"),
        is_sheddable=row.get("sheddable", False),
        max_output_tokens=most,
    )


def _seconds(row: Mapping[str, Any], key: str) -> float | None:
    return float(row[key]) if key in row else None


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value))  # type: ignore[arg-type]
