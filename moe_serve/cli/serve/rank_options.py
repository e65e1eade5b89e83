"""The options of `serve` and `launch` about ranks and cells."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.cli.options import option

RANKS = "Ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Options about the numbers of ranks."""

    attention_ranks: int | None = option(
        None,
        key="cluster.attention_ranks",
        help="Number of attention ranks. Each one computes attention for its own requests and has "
        "its own KV cache. With 0 here and in --expert-ranks, one process does everything. "
        "Default: 0.",
        rich_help_panel=RANKS,
    )
    expert_ranks: int | None = option(
        None,
        key="cluster.expert_ranks",
        help="Number of expert ranks. Each one is a process that holds and computes some of the "
        "experts. Default: 0.",
        rich_help_panel=RANKS,
    )
    cells: str | None = option(
        None,
        key="cells.layout",
        help=(
            "Groups of ranks that step independently, such as '1x(1A1E prefill) 2x(1A2E decode)'; "
            "replaces --attention-ranks and --expert-ranks. Default: one group."
        ),
        rich_help_panel=RANKS,
    )
    autoscale: str | None = option(
        None,
        key="cells.autoscale",
        help=(
            "How the number of cells follows the load: static (it does not), target (keeps the "
            "share of taken seats near a target) or planned (follows a forecast and a plan). "
            "Default: static."
        ),
        rich_help_panel=RANKS,
    )
    max_cells: int | None = option(
        None,
        key="cells.max_cells",
        help="Largest number of cells of each role. Required with --autoscale target or planned.",
        rich_help_panel=RANKS,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """Options about the ranks."""

    attention_tp: int | None = option(
        None,
        key="cluster.attention_tp",
        help="Number of processes that share the attention heads of each attention rank (tensor "
        "parallelism). Default: 1.",
        rich_help_panel=RANKS,
    )
    placement: str | None = option(
        None,
        key="cluster.placement",
        help="JSON file that assigns experts to expert ranks, written by `moe-serve place --out`. "
        "Default: each rank holds an equal number of consecutive experts.",
        rich_help_panel=RANKS,
    )
    timeline: str | None = option(
        None,
        "--timeline",
        key="pipeline.timeline",
        help="File for a timeline of what every rank does; `moe-serve timeline` reads it. "
        "Default: no timeline is written.",
        rich_help_panel=RANKS,
    )
