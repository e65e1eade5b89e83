"""On which side of the data plane experts are chosen: what moves fewer bytes.

With K choices, E expert ranks and rows of b bytes, a row that was routed first goes to as many
ranks as hold one of its experts, E (1 - (1 - 1/E)^K) of them if all are alike, with its choices (8
bytes each). A row that is routed by the expert ranks goes to all E, alone, and its sums come back
with its number (4 bytes). The sums themselves are the same either way.
"""

from __future__ import annotations

WORTH = 0.9  # of the other side's bytes: routing on the expert ranks is work that they do each


def routed_bytes(row_bytes: int, top_k: int, num_expert_ranks: int) -> float:
    """Of one row on its way, when the attention side chooses."""
    num_ranks = num_expert_ranks * (1.0 - (1.0 - 1.0 / num_expert_ranks) ** top_k)
    return num_ranks * (row_bytes + 8 * top_k)


def broadcast_bytes(row_bytes: int, num_expert_ranks: int) -> float:
    """Of one row on its way, when the expert side chooses."""
    return num_expert_ranks * (row_bytes + 4.0)


def is_broadcast_worth(row_bytes: int, top_k: int, num_expert_ranks: int) -> bool:
    """Whether `router: auto` lets the expert ranks choose.

    Worked example, 2048 values in bf16, K = 8, E = 4: 3.6 ranks x 4160 bytes against 4 x 4100, no.
    256 values, E = 1: 576 bytes against 516, yes.
    """
    routed = routed_bytes(row_bytes, top_k, num_expert_ranks)
    return broadcast_bytes(row_bytes, num_expert_ranks) <= WORTH * routed
