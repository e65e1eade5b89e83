"""All results of `pingpong`, and its targets, met or missed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from .ablation import Ablation
from .calibrated import Expected
from .deepspeed_layer import DeepSpeedTimes
from .engines import COLOCATED, EngineTimes

_WITHIN = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    what: str
    wanted: str
    measured: str
    is_met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReport:
    """The results; `ablation` is None and `engines` is empty if that part did not run."""

    environment: dict[str, str]
    model: dict[str, object]
    context: int
    busy_cores: float
    ablation: Ablation | None = None
    expected: tuple[Expected, ...] = ()  # by `moe-serve calibrate`
    engines: tuple[EngineTimes, ...] = ()
    deepspeed: DeepSpeedTimes | None = None

    def verdicts(self) -> list[Verdict]:
        return [*self._of_ablation(), *self._of_engines()]

    def merged(self, path: Path) -> PairReport:
        """Returns the report with results of the file that this run lacks."""
        old = msgspec.json.decode(path.read_bytes(), type=PairReport)
        if (old.model, old.context) != (self.model, self.context):
            raise SystemExit(f"{path} has another model or context: give another file to --json.")
        by_batch = {times.batch: times for times in (*old.engines, *self.engines)}
        return replace(
            self,
            ablation=self.ablation or old.ablation,
            expected=self.expected if self.ablation else old.expected,
            engines=tuple(by_batch[batch] for batch in sorted(by_batch)),
            deepspeed=self.deepspeed or old.deepspeed,
        )

    def rival_tokens_per_s(self) -> float | None:
        """Returns the throughput if DeepSpeed's layer follows our attention for half of the batch.

        The head is not included: compare it with tokens over the time of a step's layers.
        """
        if self.ablation is None or self.deepspeed is None or self.deepspeed.missing:
            return None
        layer_s = self.ablation.reference.attention_s + self.deepspeed.layer_s
        return self.ablation.batch / (self.ablation.num_layers * layer_s)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self) | {"verdicts": [asdict(v) for v in self.verdicts()]}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _of_ablation(self) -> Iterator[Verdict]:
        found = self.ablation
        if found is None:
            return
        without, half = 0.0, _nearest(found.delays, found.reference.slower_s / 2)
        two = found.ratio(found.cut, without, 2, 1)
        yield Verdict(
            what="m = 2 over m = 1, no delay",
            wanted="1.6x",
            measured=f"{two:.2f}x (grown: {found.ratio(found.grown, without, 2, 1):.2f}x)",
            is_met=two >= 1.6,
        )
        if half:
            three = found.ratio(found.cut, half, 3, 2)
            yield Verdict(
                what="m = 3 over m = 2, T_c about T_f / 2",
                wanted="1.15x",
                measured=f"{three:.2f}x (grown: {found.ratio(found.grown, half, 3, 2):.2f}x)",
                is_met=three >= 1.15,
            )
        points = [*found.cut, *found.grown]
        full = [p for p in points if p.is_full]
        if full:
            yield _within("the formula, where it is full", [p.formula_error for p in full])
        yield _within("its extension, everywhere", [p.model_error for p in points])
        if self.expected:
            yield _within("moe-serve calibrate's, no delay", [each.error for each in self.expected])

    def _of_engines(self) -> Iterator[Verdict]:
        if not self.engines:
            return
        largest = max(self.engines, key=lambda times: times.batch)
        name, best_s = largest.best_fixed()
        ratio = largest.seconds[COLOCATED] / best_s
        yield Verdict(
            what=f"1A1E at m = {name} over colocated, 2 threads, batch {largest.batch}",
            wanted="0.9x",
            measured=f"{ratio:.2f}x",
            is_met=ratio >= 0.9,
        )
        behind = {t.batch: t.auto_behind.share for t in self.engines if t.batch <= 128}
        if behind:
            worst = max(behind, key=lambda batch: behind[batch])
            yield Verdict(
                what=f"auto behind the best m, batches {min(behind)} to {max(behind)}",
                wanted="at most 5%",
                measured=f"{behind[worst]:+.1%} at batch {worst}",
                is_met=behind[worst] <= 0.05,
            )
        yield Verdict(
            what="the same tokens as colocated",
            wanted="all",
            measured=f"{sum(t.has_equal_tokens for t in self.engines)} of {len(self.engines)}",
            is_met=all(t.has_equal_tokens for t in self.engines),
        )


def _within(what: str, errors: list[float]) -> Verdict:
    worst = max(errors, key=abs)
    return Verdict(
        what=f"step times within 15% of {what}",
        wanted=f"{len(errors)} of {len(errors)}",
        measured=f"{sum(abs(e) <= _WITHIN for e in errors)}, worst {worst:+.1%}",
        is_met=abs(worst) <= _WITHIN,
    )


def _nearest(delays: list[float], wanted_s: float) -> float:
    return min(delays, key=lambda delay_s: abs(delay_s - wanted_s))
