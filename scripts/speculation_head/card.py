"""Writes the card of a head: what it accepts, beside the table it must beat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).with_name("card_template.md")
MIN_FIRST, MIN_GAIN = 0.60, 0.10  # of the first drafted token, greedy


def write_card(folder: Path, figures: dict[str, Any]) -> None:
    """Writes README.md."""
    card = _TEMPLATE.read_text(encoding="utf-8").format(
        model=figures["model"],
        verdict=_verdict(figures),
        greedy=_table(figures["greedy"]),
        sampled=_table(figures["sampled at 0.7"]),
        hot=_table(figures["sampled at 1.0"]),
        kib=figures["training"]["bytes"] / 1024,
        parameters_m=figures["training"]["parameters"] / 1e6,
        positions_m=figures["training"]["positions"] / 1e6,
        minutes=figures["training"]["minutes"],
        table_tokens_m=figures["table"]["tokens"] / 1e6,
        prompt_tokens=figures["prompt_tokens"],
        texts=figures["texts_per_label"],
        count=figures["tokens_per_text"],
        drafted=figures["drafted_tokens"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _verdict(figures: dict[str, Any]) -> str:
    """Says which bars are missed, misses first, and by which labels."""
    greedy = figures["greedy"]
    missed, met = list[str](), list[str]()
    first = greedy["head"]["all"]["first"]
    gain = first - greedy["table"]["all"]["first"]
    for name, value, bar in (
        ("first token, greedy", first, MIN_FIRST),
        ("above the table", gain, MIN_GAIN),
    ):
        (met if value >= bar else missed).append(f"{name}: {value:.3f} (bar {bar:.2f})")
    below = [
        f"{label} {each['first']:.3f}"
        for label, each in greedy["head"].items()
        if label != "all" and each["first"] < MIN_FIRST
    ]
    behind = [
        f"{label} {each['first'] - greedy['table'][label]['first']:+.3f}"
        for label, each in greedy["head"].items()
        if label != "all" and each["first"] - greedy["table"][label]["first"] < MIN_GAIN
    ]
    lines = [f"- **Missed**: {each}" for each in missed]
    lines += [f"- Below {MIN_FIRST:.2f} alone: {', '.join(below)}"] if below else []
    lines += [f"- Less than {MIN_GAIN:.2f} above the table: {', '.join(behind)}"] if behind else []
    return "\n".join(lines + [f"- Met: {each}" for each in met])


def _table(kind: dict[str, Any]) -> str:
    lines = [
        "| text | places | table | head | head at 1, 2, 3, 4 | tokens per step: table, head |",
        "|---|---|---|---|---|---|",
    ]
    rows = {label: (each, kind["table"][label]) for label, each in kind["head"].items()}
    rows["all, texts without any loop"] = (
        kind["head, texts without any loop"],
        kind["table, texts without any loop"],
    )
    for label, (head, table) in rows.items():
        positions = ", ".join(f"{share:.2f}" for share in head["by_position"])
        lines.append(
            f"| {label} | {head['num_places']} | {table['first']:.3f} | {head['first']:.3f} "
            f"| {positions} | {table['tokens_per_step']:.2f}, {head['tokens_per_step']:.2f} |"
        )
    return "\n".join(lines)
