"""A service tier: the targets of its requests, and the weight of their delay.

A tier is written as a mapping, in YAML or as JSON:

    scheduler:
      tiers:
        interactive: {weight: 4, ttft_s: 1.0, tpot_s: 0.1}
        flex: {weight: 1, e2e_s: 600, sheddable: true}
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """One service tier. A target that is None is not set."""

    name: str
    weight: float = 1.0  # how much a second of delay counts, beside that of other tiers
    ttft_s: float | None = None  # from the arrival to the first token
    tpot_s: float | None = None  # between two tokens, on average
    e2e_s: float | None = None  # from the arrival to the last token
    is_sheddable: bool = False  # YAML: sheddable; may be refused when its target cannot be met
    max_output_tokens: int | None = None  # a hard limit of every answer; None: none
