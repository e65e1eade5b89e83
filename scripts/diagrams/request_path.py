"""Draws the path from a POST to a token and back."""

from __future__ import annotations

from diagrams.svg import Picture


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
