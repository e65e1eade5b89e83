"""Reads the figures of a moe-serve server from /metrics, before and after a run.

Other servers use other metric names, so nothing is reported about them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_PREFIX = "moe_serve:"
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """One page of metrics: (name, labels in order) -> value."""

    values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

    @classmethod
    def parse(cls, page: str) -> Metrics:
        """Parses a page. Lines that are not samples or have no number are skipped, as the page may
        come from any server."""
        values = {}
        for line in page.splitlines():
            match = _SAMPLE.fullmatch(line.strip())
            if match is None or not match[1].startswith(_PREFIX):
                continue
            try:
                value = float(match[3])
            except ValueError:
                continue
            if not math.isfinite(value):
                continue  # Prometheus's word for "not known"; JSON has none
            labels = tuple((m[1], m[2]) for m in _LABEL.finditer(match[2] or ""))
            values[match[1].removeprefix(_PREFIX), labels] = value
        return cls(values=values)

    def total(self, name: str) -> float | None:
        """Returns the sum over labels, or None if the page has no such sample."""
        found = [value for (key, _), value in self.values.items() if key == name]
        return sum(found) if found else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for (key, labels), value in self.values.items():
            if key == name and (text := dict(labels).get(label)) is not None:
                sums[text] = sums.get(text, 0.0) + value
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSide:
    """Differences of the server's counters over the run. A field is None if the server does not
    count it."""

    num_steps: float
    tokens_per_step: float  # generated and computed prompt tokens together
    prefix_hit_rate: float | None  # of the prompt tokens that were looked up
    num_preemptions: float
    experts_needed_per_step: (
        float | None
    )  # only servers with an expert memory report it; all layers
    expert_hit_rate: float | None  # of the experts needed, those in memory
    predicted_experts_per_step: float | None  # reported by a batch policy for the last step only
    placement_switches: float | None  # only servers that move experts report it
    steps_by_micro_batches: dict[str, float] = field(default_factory=dict)
    runaways: dict[str, float] = field(default_factory=dict)  # answers that became one, by tier

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> ServerSide | None:
        """Returns the differences, or None if the server is not moe-serve or did nothing."""

        def grown(name: str) -> float | None:
            first, last = before.total(name), after.total(name)
            return None if last is None else last - (first or 0.0)

        num_steps = grown("engine_steps_total")
        if not num_steps or num_steps < 0:  # below 0: it was restarted
            return None
        tokens = (grown("generation_tokens_total") or 0) + (grown("prompt_tokens_total") or 0)
        needed = grown("expert_memory_needed_total")

        def grown_by(name: str, label: str) -> dict[str, float]:
            first, last = before.by_label(name, label), after.by_label(name, label)
            found = {key: num - first.get(key, 0.0) for key, num in last.items()}
            return {key: num for key, num in sorted(found.items()) if num > 0}

        return cls(
            num_steps=num_steps,
            tokens_per_step=tokens / num_steps,
            prefix_hit_rate=_share(
                grown("prefix_cache_hits_total"), grown("prefix_cache_queries_total")
            ),
            num_preemptions=grown("num_preemptions_total") or 0.0,
            experts_needed_per_step=None if needed is None else needed / num_steps,
            expert_hit_rate=_share(grown("expert_memory_hits_total"), needed),
            predicted_experts_per_step=after.total("activated_experts_predicted"),
            placement_switches=grown("placement_version"),
            steps_by_micro_batches=grown_by("pipeline_steps_total", "micro_batches"),
            runaways=grown_by("tier_runaways_total", "tier"),
        )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
