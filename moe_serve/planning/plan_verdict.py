"""Decides whether disaggregation is worth it, and explains the decision in a sentence with the
numbers.

FastAFD's identity splits the gain into factors: S = (B_a / B_v) (A / (A + E)) (T_v / T_a). They are
the batch of an attention device over that of a replica, the share of devices that hold requests,
and the ratio of step times. The identity is exact: both sides are tokens per second over tokens per
second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.planning.layout_planner import PlannedLayout, PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutVerdict:
    """`gain` is that of the best split over the best layout of whole models, in tokens per second,
    or in speed of a step if a rate was requested. None if one of the two cannot be used."""

    is_worth_it: bool
    gain: float | None
    sentence: str


def verdict(layouts: Sequence[PlannedLayout], request: PlanRequest) -> LayoutVerdict:
    """Compares layouts as planned for `request`, best first."""
    layouts = [layout for layout in layouts if layout.is_served]
    usable = [layout for layout in layouts if not layout.reason]
    split = next((x for x in usable if x.kind == "disaggregated"), None)
    whole = next((x for x in usable if x.kind != "disaggregated"), None)
    if split is None and whole is None:
        why = "; ".join(f"{x.name}: {x.reason}" for x in _one_each(layouts))
        return LayoutVerdict(
            is_worth_it=False,
            gain=None,
            sentence=f"no layout of these devices can do this ({why})",
        )
    if whole is None:
        assert split is not None, "one of the two is there"
        why = "; ".join(f"{x.name}: {x.reason}" for x in layouts if x.kind != "disaggregated")
        return LayoutVerdict(
            is_worth_it=True,
            gain=None,
            sentence=f"only disaggregation can do this: {_figures(split)} ({why})",
        )
    if split is None:
        why = next((x.reason for x in layouts if x.kind == "disaggregated"), "it needs 2 devices")
        return LayoutVerdict(
            is_worth_it=False,
            gain=None,
            sentence=f"disaggregation cannot do this here ({why}): {_figures(whole)}",
        )
    return _compared(split, whole, has_rate=request.rate is not None)


def _compared(split: PlannedLayout, whole: PlannedLayout, *, has_rate: bool) -> LayoutVerdict:
    speed = whole.step_s / split.step_s
    gain = speed if has_rate else split.tokens_per_s / whole.tokens_per_s
    parts = (
        f"batch per device x{_batch(split) / _batch(whole):.2f}, "
        f"devices with requests x{_holders(split) / _holders(whole):.2f}, "
        f"speed of a step x{speed:.2f}"
    )
    percent = f"{100 * (gain - 1):+.0f}%"
    if gain > 1:
        return LayoutVerdict(
            is_worth_it=True,
            gain=gain,
            sentence=f"disaggregation wins: {_figures(split)} against {_figures(whole)} "
            f"({percent}: {parts})",
        )
    return LayoutVerdict(
        is_worth_it=False,
        gain=gain,
        sentence=f"disaggregation is not worth it here: {_figures(whole)}, "
        f"best split {_figures(split)} ({percent}: {parts})",
    )


def _figures(layout: PlannedLayout) -> str:
    verb = "give" if layout.kind == "replicated" else "gives"
    return (
        f"{layout.name} {verb} {layout.tokens_per_s:.0f} tokens/s "
        f"at {1e3 * layout.step_s:.2f} ms with {layout.batch} sequences"
    )


def _batch(layout: PlannedLayout) -> float:
    """Returns the sequences of a device that holds requests."""
    return layout.batch / _holders(layout)


def _holders(layout: PlannedLayout) -> int:
    return layout.num_attention * layout.num_shards


def _one_each(layouts: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Returns one layout of each kind, in order."""
    return list({x.kind: x for x in reversed(layouts)}.values())[::-1]
