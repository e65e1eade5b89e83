"""Options of `moe-serve simulate` about service tiers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from moe_serve.cli.options import option

DEADLINES = "Service tiers"


class OrderChoice(str, Enum):
    AUTO = "auto"
    FIFO = "fifo"
    PRIORITY = "priority"
    EDF = "edf"
    ATC = "atc"


class LateChoice(str, Enum):
    KEEP = "keep"
    DEMOTE = "demote"


class PreemptChoice(str, Enum):
    MEMORY = "memory"
    DEADLINE = "deadline"


class BudgetChoice(str, Enum):
    AUTO = "auto"
    FIXED = "fixed"
    SLACK = "slack"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineOptions:
    """Options about service tiers, named as the server's settings."""

    order: OrderChoice = option(
        OrderChoice.AUTO,
        help="Order of waiting requests: fifo (arrival), priority, edf (earliest deadline), atc "
        "(deadlines weighed against remaining work) or auto (atc with tiers, else priority).",
        rich_help_panel=DEADLINES,
    )
    patience: float = option(
        2.0,
        min=0.01,
        max=3600.0,
        help="With --order atc: seconds before its deadline at which a request becomes urgent.",
        rich_help_panel=DEADLINES,
    )
    max_wait: float = option(
        90.0,
        min=0.1,
        max=604800.0,
        help="With --order edf or atc: seconds of waiting after which a request goes first.",
        rich_help_panel=DEADLINES,
    )
    late: LateChoice = option(
        LateChoice.KEEP,
        help="With --order edf or atc: treatment of requests that can no longer meet their target: "
        "keep (they keep their place in the order) or demote (they go last).",
        rich_help_panel=DEADLINES,
    )
    preempt: PreemptChoice = option(
        PreemptChoice.MEMORY,
        help="When running requests are interrupted: memory (only when KV pages run out) or "
        "deadline (also for an urgent request when all seats are taken).",
        rich_help_panel=DEADLINES,
    )
    step_budget: BudgetChoice = option(
        BudgetChoice.AUTO,
        help="Prompt tokens in a step: fixed (up to --max-batched-tokens), slack (as many as "
        "the tpot_s of running requests allows) or auto (slack if a tier has tpot_s, else fixed).",
        rich_help_panel=DEADLINES,
    )
    strict: bool = option(
        False,
        help="Make all requests strict: the server refuses those whose targets it cannot meet.",
        rich_help_panel=DEADLINES,
    )
