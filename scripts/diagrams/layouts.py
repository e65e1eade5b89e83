"""Draws the two layouts of a model: everything in one process, or two pools of ranks."""

from __future__ import annotations

from diagrams.svg import Picture


def layouts() -> Picture:
    picture = Picture(
        "One process, or attention ranks and expert ranks",
        "Left: one process holds the engine, the attention stage and all experts. Right: a "
        "coordinator with the engine; two attention ranks with KV pages; three expert ranks with "
        "experts, some of which have a copy on a second rank. Rows go from attention ranks to "
        "expert ranks in every layer, and sums come back.",
        960,
        330,
    )
    _one_process(picture)
    _ranks(picture)
    return picture


def _one_process(picture: Picture) -> None:
    picture.box("room", 20, 20, 250, 290)
    picture.text("name", 38, 46, "one process")
    picture.text("text", 38, 66, "the default")
    picture.named_box("engine", 38, 82, 214, 62, ["engine, HTTP", "queue, steps, KV page tables"])
    lines = ["attention stage", "KV pages, router, LM head"]
    picture.named_box("attention", 38, 156, 214, 62, lines)
    picture.named_box("experts", 38, 230, 214, 62, ["expert stage", "all experts"])


def _ranks(picture: Picture) -> None:
    picture.box("room", 294, 20, 646, 290)
    picture.text("name", 312, 46, "ranks: a process each, one per GPU or share of cores")
    lines = ["coordinator", "HTTP, engine", "placement", "heartbeats"]
    picture.named_box("engine", 312, 112, 130, 108, lines)
    for i, y in enumerate((72, 192)):
        lines = [f"attention rank {i}", "its requests' KV pages", "router, sampler"]
        picture.named_box("attention", 500, y, 180, 92, lines)
        picture.arrow(442, 166, 496, y + 46)
    experts = ("experts 0, 1, 2", "experts 3, 4 and 0", "experts 5, 6, 7")
    for i, y in enumerate((62, 142, 222)):
        picture.named_box("experts", 770, y, 150, 66, [f"expert rank {i}", experts[i]])
    for y in (118, 238):
        for to_y in (95, 175, 255):
            picture.arrow(680, y, 766, to_y)
    picture.text("what", 724, 303, "rows out, sums back", anchor="middle")
    picture.text("text", 312, 303, "expert 0 has a copy: a replica")
