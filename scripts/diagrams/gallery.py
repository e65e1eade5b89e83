"""The drawings of the documentation, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from diagrams.svg import Picture

_EXPERTS = 8
_CHOSEN = {0: (1, 4), 1: (4, 6)}
_LEFT, _UNIT = 150, 64
_ROWS = ("attention rank", "expert rank")


def request_path() -> Picture:
    picture = Picture(
        "The path of a request through moe-serve",
        "HTTP hands token ids to the engine. The engine schedules a step and the pipeline runs it: "
        "in every layer the attention stage dispatches rows over a transport to the expert stage "
        "and gets weighted sums back. The sampler picks tokens, and HTTP streams their text as "
        "server-sent events.",
        960,
        340,
    )
    _from_request_to_step(picture)
    _pipeline(picture)
    _from_logits_to_text(picture)
    return picture


def _from_request_to_step(picture: Picture) -> None:
    picture.text("what", 18, 81, "POST")
    picture.arrow(18, 92, 64, 92)
    lines = ["HTTP", "check the request", "chat template", "tokenize"]
    picture.named_box("http", 68, 42, 150, 100, lines)
    picture.arrow(218, 92, 272, 92)
    picture.text("what", 224, 81, "tokens")
    lines = ["engine", "bounded queue", "schedule a step", "KV page tables"]
    picture.named_box("engine", 276, 42, 150, 100, lines)
    picture.arrow(426, 92, 480, 92)
    picture.text("what", 437, 81, "step")


def _pipeline(picture: Picture) -> None:
    picture.box("room", 484, 20, 460, 300)
    picture.text("name", 502, 46, "pipeline")
    picture.text("text", 502, 66, "a step of all sequences, layer by layer")
    lines = ["attention stage", "norm", "attention over KV", "pages", "residual, norm"]
    lines += ["router: top-k", "", "last: norm, LM head"]
    picture.named_box("attention", 502, 82, 158, 188, lines)
    picture.box("transport", 698, 120, 44, 112)
    picture.upright(724, 176, "transport")
    lines = ["expert stage", "one SwiGLU MLP", "per activated", "expert", "weighted sum"]
    picture.named_box("experts", 780, 82, 146, 188, [*lines, "of each row"])
    for x in (660, 742):
        picture.arrow(x, 150, x + 34, 150)
    for x in (780, 698):
        picture.arrow(x, 204, x - 34, 204)
    picture.text("what", 720, 109, "dispatch", anchor="middle")
    picture.text("what", 720, 251, "combine", anchor="middle")
    picture.text("text", 502, 302, "rows, expert ids and weights out; one sum per row back")


def _from_logits_to_text(picture: Picture) -> None:
    picture.arrow(484, 248, 430, 248)
    picture.text("what", 439, 237, "logits")
    lines = ["sampler", "one row at a time,", "one draw per", "(seed, position)"]
    picture.named_box("engine", 276, 198, 150, 100, lines)
    picture.arrow(276, 248, 222, 248)
    picture.text("what", 229, 237, "tokens")
    picture.arrow(351, 198, 351, 146)
    picture.text("what", 360, 176, "next step")
    picture.named_box("http", 68, 198, 150, 100, ["SSE", "detokenize", "stop strings", "stream"])
    picture.arrow(68, 248, 22, 248)
    picture.text("what", 18, 237, "text")


def ping_pong() -> Picture:
    picture = Picture(
        "Ping-pong: micro-batches between attention and expert ranks",
        "With one micro-batch the attention rank waits while the expert rank works, and the other "
        "way round. With two, the attention rank computes micro-batch 1 while the experts have "
        "micro-batch 0, so both are busy.",
        960,
        300,
    )
    picture.text("name", 20, 34, "one micro-batch: each pool waits for the other")
    _tracks(picture, 48, [[(0, 2, "0"), (4, 2, "0"), (8, 2, "0")], [(2, 2, "0"), (6, 2, "0")]])
    words = "two micro-batches: while one is with the experts, the other attends"
    picture.text("name", 20, 168, words)
    attention = [(i * 1.15, 1.0, str(i % 2)) for i in range(8)]
    experts = [(1.15 + i * 1.15, 1.0, str(i % 2)) for i in range(8)]
    _tracks(picture, 182, [attention, experts])
    picture.text(
        "text",
        20,
        286,
        "Numbers are micro-batches, boxes are layers' stages, and time runs to the right. "
        "Smaller batches touch more experts' weights in all, so splitting may also lose.",
    )
    return picture


def _tracks(picture: Picture, y: float, tracks: list[list[tuple[float, float, str]]]) -> None:
    for row, spans in enumerate(tracks):
        top = y + 44 * row
        picture.text("text", 20, top + 23, _ROWS[row])
        for start, length, words in spans:
            x = _LEFT + _UNIT * 1.15 * start
            width = _UNIT * 1.15 * length - 3
            picture.box("attention" if row == 0 else "experts", x, top, width, 36)
            picture.text("name", x + width / 2, top + 23, words, anchor="middle")


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


IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: Mapping[str, Callable[[], Picture]] = {
    "layouts.svg": layouts,
    "moe-layer.svg": moe_layer,
    "ping-pong.svg": ping_pong,
    "request-path.svg": request_path,
}
