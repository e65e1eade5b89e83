"""The measured time of whole steps, of one process or of the ranks of a layout on one machine.

Ranks that share a machine compete for its cores, its caches and its memory, and one coordinator
schedules for all of them. Stages that were measured one by one do not show that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_serve.pipeline.costs.step_costs import BatchLoad

FEW_ROWS = (2, 8, 32)  # the cost of a further row may fall at these numbers of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """A step as measured on a mix of prompts and answers. Stages take less time than measured one
    by one, where all layers are one call.

    The terms are those of `AttentionCost` and `ExpertCost` for all layers together; `sequence_s`:
    head, sampling and scheduling of a sequence; `few_rows_s`: what each of the first `FEW_ROWS`
    rows costs beside `row_s`; `scatter`: evenly spaced quantiles of measured over predicted times.
    """

    alpha_s: float
    row_s: float
    kv_token_s: float
    pair_s: float
    expert_s: float
    sequence_s: float
    few_rows_s: tuple[float, ...] = ()
    scatter: tuple[float, ...] = ()

    def seconds(self, load: BatchLoad, num_activated: float) -> float:
        """Returns the seconds of a step that activates this many experts in a layer."""
        rows = load.num_rows
        few_s = sum(s * min(rows, k) for s, k in zip(self.few_rows_s, FEW_ROWS, strict=False))
        return (
            self.alpha_s
            + self.row_s * rows
            + self.kv_token_s * load.num_kv_tokens
            + self.pair_s * load.num_pairs
            + self.expert_s * num_activated
            + self.sequence_s * load.num_sequences
            + few_s
        )


def whole_step_terms(load: BatchLoad, num_activated: float) -> tuple[float, ...]:
    """Returns the factors of the coefficients of a `WholeStep`, in their order."""
    return (
        1.0,
        load.num_rows,
        load.num_kv_tokens,
        load.num_pairs,
        num_activated,
        load.num_sequences,
        *(min(load.num_rows, k) for k in FEW_ROWS),
    )


def busiest(loads: Sequence[BatchLoad]) -> BatchLoad:
    """Returns the largest load in each respect over several attention ranks."""
    if len(loads) == 1:
        return loads[0]
    return BatchLoad(
        num_rows=max(load.num_rows for load in loads),
        num_sequences=max(load.num_sequences for load in loads),
        num_kv_tokens=max(load.num_kv_tokens for load in loads),
        num_pairs=max(load.num_pairs for load in loads),
        num_largest=max(load.num_largest for load in loads),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutStep:
    """The steps of the ranks of one layout that share one machine. `whole` takes the load of the
    busiest attention rank.

    `machine_share` is the share of the machine that such a cell takes while it computes. Cells that
    together take more than 1 slow each other down in proportion.
    """

    attention_ranks: int
    expert_ranks: int
    attention_tp: int
    machine_share: float
    whole: WholeStep

    @property
    def name(self) -> str:
        """The layout as in `--layouts`: `1A2E tp2`."""
        tp = f" tp{self.attention_tp}" if self.attention_tp > 1 else ""
        return f"{self.attention_ranks}A{self.expert_ranks}E{tp}"
