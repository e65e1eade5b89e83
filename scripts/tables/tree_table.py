"""Renders the floor plan in docs/internals/tree.md from the docstrings of the folders.

PYTHONPATH=scripts python -m tables.tree_table            print it
PYTHONPATH=scripts python -m tables.tree_table --write    put it into the page
"""

from __future__ import annotations

import ast
from pathlib import Path

from tables.page_block import PageBlock

ROOT = Path(__file__).resolve().parents[2]
WINGS = ("moe_serve", "experts", "routing_predictor", "kernels/moe_kernels")
BLOCK = PageBlock(
    page=ROOT / "docs" / "internals" / "tree.md",
    start="<!-- floor-plan: start -->",
    end="<!-- floor-plan: end -->",
)


def folders() -> list[Path]:
    """List the packages of the product, each before its sub-folders."""
    found = [init.parent for wing in WINGS for init in (ROOT / wing).rglob("__init__.py")]
    return sorted(path.relative_to(ROOT) for path in found)


def render() -> str:
    rows = [f"| `{path.as_posix()}/` | {purpose(ROOT / path)} |" for path in folders()]
    return "\n".join(["| folder | contents |", "|---|---|", *rows])


def purpose(folder: Path) -> str:
    """Returns the first paragraph of the folder's docstring as one line."""
    tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
    text = ast.get_docstring(tree) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    BLOCK.main(render, "Prints the floor plan of the source folders.")
