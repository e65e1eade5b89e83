"""Draws the work of a Mixture-of-Experts layer on two rows."""

from __future__ import annotations

from diagrams.svg import Picture

_EXPERTS = 8
_CHOSEN = {0: (1, 4), 1: (4, 6)}


def moe_layer() -> Picture:
    picture = Picture(
        "A Mixture-of-Experts layer: the router chooses k of E experts for each row",
        "Two rows leave the attention stage. The router chooses experts 1 and 4 for the first and "
        "4 and 6 for the second. Only experts 1, 4 and 6 are activated: their weights are read, "
        "the other five are not. Each row gets the weighted sum of its experts' outputs.",
        960,
        250,
    )
    for row, y in enumerate((62, 142)):
        picture.named_box("attention", 20, y, 130, 56, [f"row {row}", "after attention"])
        picture.arrow(150, y + 28, 196, y + 28)
    lines = ["router", "scores of E", "experts;", "the top k", "with weights"]
    picture.named_box("engine", 200, 52, 120, 156, lines)
    activated = {expert for chosen in _CHOSEN.values() for expert in chosen}
    for expert in range(_EXPERTS):
        x = 400 + 48 * expert
        kind = "experts" if expert in activated else "transport"
        picture.box(kind, x, 96, 40, 68)
        picture.text("name", x + 20, 135, str(expert), anchor="middle")
    for row, chosen in _CHOSEN.items():
        for expert in chosen:
            y, to_y = (62, 92) if row == 0 else (198, 168)
            picture.arrow(320, y, 420 + 48 * expert, to_y)
    words = f"E = {_EXPERTS} experts, top-k = 2: 3 are activated, so 3 experts' weights are read"
    picture.text("text", 400, 36, words)
    picture.named_box("attention", 826, 92, 114, 76, ["sum", "of each row's", "experts, weighted"])
    picture.arrow(782, 130, 822, 130)
    words = "decode costs the bytes of the activated experts; prefill the rows of the busiest one"
    picture.text("text", 400, 230, words)
    return picture
