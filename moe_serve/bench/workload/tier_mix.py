"""The service tiers of a workload: a file of tiers, and the share of the requests in each.

    tiers:
      interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1}
      standard: {weight: 2, ttft_s: 5.0}
      flex: {weight: 1, e2e_s: 600, sheddable: true}
    shares: {interactive: 0.5, standard: 0.3, flex: 0.2}
    priorities: {standard: 2, flex: 12}

`priorities` are what requests would send as `priority` to a server that orders by it. A row of a
trace may name its own tier. The tiers of the other requests are drawn by the shares; the same seed
draws the same tiers. Without `shares`, all tiers are equally frequent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_serve.config.tiers import TierConfig, check_tiers
from moe_serve.errors import BenchError
from moe_serve.regular_file import regular_file

_KEYS = ("tiers", "shares", "priorities")
_LARGEST = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMix:
    """Tiers, and how frequent each is. The shares add up to 1."""

    tiers: tuple[TierConfig, ...]
    shares: tuple[float, ...]
    priorities: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tiers: Sequence[TierConfig],
        shares: Mapping[str, float] | None = None,
        priorities: Mapping[str, int] | None = None,
    ) -> TierMix:
        """Makes a mix. Shares may have any sum above 0; a tier without one is never drawn."""
        names = [tier.name for tier in tiers]
        given = dict.fromkeys(names, 1.0) if shares is None else shares
        levels = priorities or {}
        for key, row in (("shares", given), ("priorities", levels)):
            for name in row:
                if name not in names:
                    known = ", ".join(names)
                    raise BenchError(f"{key} has a tier {name!r}; the tiers are {known}.")
        for name, share in given.items():
            if not 0 <= share <= _LARGEST:
                raise BenchError(f"the share of tier {name!r} must be 0 or more, got {share}.")
        total = sum(given.values())
        if total <= 0:
            raise BenchError("shares must have a number above 0: no request would have a tier.")
        return cls(
            tiers=tuple(tiers),
            shares=tuple(given.get(name, 0.0) / total for name in names),
            priorities=tuple(levels.get(name, 0) for name in names),
        )

    def named(self, name: str) -> TierConfig:
        """Returns a tier by its name. Raises BenchError."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        names = ", ".join(tier.name for tier in self.tiers)
        raise BenchError(f"a request of the trace has tier {name!r}; the tiers are {names}.")

    def priority_of(self, name: str) -> int:
        """Returns the priority that requests of a tier send."""
        return self.priorities[[tier.name for tier in self.tiers].index(name)]

    def at(self, place: float) -> TierConfig:
        """Returns the tier at a place from 0 to 1 in the row of all shares."""
        for tier, share in zip(self.tiers, self.shares, strict=True):
            place -= share
            if place < 0:
                return tier
        return self.tiers[int(np.argmax(self.shares))]

    def facts(self) -> dict[str, object]:
        """Returns the tiers as JSON types, for a report."""
        return {
            tier.name: {
                "share": share,
                "weight": tier.weight,
                "ttft_s": tier.ttft_s,
                "tpot_s": tier.tpot_s,
                "e2e_s": tier.e2e_s,
                "sheddable": tier.is_sheddable,
                "max_output_tokens": tier.max_output_tokens,
                "predicted_output_limit": tier.predicted_output_limit,
                "runaways": tier.runaways,
            }
            for tier, share in zip(self.tiers, self.shares, strict=True)
        }


def read_tier_mix(path: Path) -> TierMix:
    """Reads a file of tiers, YAML or JSON. Raises BenchError and ConfigError."""
    try:
        content = yaml.safe_load(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise BenchError(f"{path} is not YAML: it must have tiers, and may have shares.") from None
    if not isinstance(content, dict) or not content.keys() <= set(_KEYS):
        raise BenchError(f"{path} must have tiers, and may have shares and priorities.")
    if not content.get("tiers"):
        raise BenchError(f"{path} has no tiers: write tiers: {{NAME: {{weight: 1, ttft_s: 1}}}}.")
    return TierMix.of(
        check_tiers(content["tiers"], "tiers", str(path)),
        _numbers(content, "shares", (int, float), path),
        _numbers(content, "priorities", (int,), path),
    )


def _numbers(
    content: Mapping[str, Any], key: str, kinds: tuple[type, ...], path: Path
) -> dict[str, Any] | None:
    """Reads a number for each tier; None: the file has none."""
    row = content.get(key)
    if row is None:
        return None
    if not isinstance(row, dict):
        raise BenchError(f"{key} of {path} must be a mapping of tiers to numbers.")
    for name, value in row.items():
        if type(value) not in kinds or not math.isfinite(value):
            raise BenchError(f"{key} of {path}: {name} must be a number, got {value!r}.")
    return {str(name): value for name, value in row.items()}
